"""The draft: trained by speculators, exported for vLLM. The only importer of speculators.

Nothing of EAGLE-3 is computed here: the model, its losses, the packing, the loader, the trainer
and the optimizers are upstream's. This package hands them checked data, stores what they save,
and refuses what they would let pass.

Of speculators 0.9.0, its `hs_connectors`, and `datasets` it relies on exactly these names
(tests/test_draft.py imports every one, and fails on a name that is used but not listed):

    hs_connectors.HiddenStatesBackend.register             @register(name), four static hooks
    hs_connectors.HiddenStatesTransfer                     get_cached(row) -> states and ids
    datasets.Dataset.from_dict
    datasets.Dataset.save_to_disk                          the folder that upstream loads
    datasets.disable_progress_bars
    speculators.train.config.TrainConfig.from_sources      cli=, argv=
    speculators.train.config.TrainConfig.flatten           what it resolved, by flat name
    speculators.train.cli.main                             one whole training
    speculators.train.cli.Trainer                          replaced by ours, which extends it
    speculators.train.cli.maybe_setup_distributed          replaced without an accelerator
    speculators.train.trainer.Trainer.run_training
    speculators.train.trainer.Trainer.train_epoch          step_callback= after every step
    speculators.train.trainer.Trainer.val_epoch
    speculators.train.trainer.Trainer.maybe_save_checkpoint
    speculators.train.trainer.tqdm                         replaced by no bar
    speculators.train.trainer.get_local_rank               replaced without an accelerator
    speculators.train.checkpointer.SingleGPUCheckpointer.save_checkpoint
    speculators.train.checkpointer.get_current_device      replaced without an accelerator
    speculators.train.distributed._is_distributed          set by our set-up without accelerators
    speculators.train.distributed._local_rank
    speculators.train.distributed._rank
    speculators.train.distributed._world_size
    speculators.train.distributed._init_sp_process_groups
    speculators.train.distributed_batch_sampler.MultipackDistributedBatchSamplerV2
    speculators.models.eagle3.Eagle3DraftModel
    speculators.models.eagle3.Eagle3SpeculatorConfig

Besides names: the logger `speculators.metrics` carries dict records `train` (with `lr`,
`global_step`) and `val`; a `Trainer` has `global_step`, `_resume_local_step`, `checkpointer`,
`optimizers`, `model`, `rank`, `local_rank`, `device_type`, `is_distributed`, `config.max_steps`;
a checkpoint is a folder named by its epoch whose `training_state.json` is written last.
"""
