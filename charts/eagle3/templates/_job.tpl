{{/* The one shape of a stage's Job. Takes root, facts (a row of files/stages.json). */}}
{{- define "eagle3.job" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $stage := .facts.name -}}
{{- $size := index $values.stages $stage -}}
{{- $names := dict "root" $root "component" $stage -}}
{{- $claimed := and .facts.readsWeights $values.weights.claim -}}
{{- $volumes := dict "root" $root "scratch" $size.scratch "shm" $size.shm "weights" $claimed -}}
{{- $digest := (index $values.images .facts.image).digest -}}
{{- $usual := dict -}}
{{- if eq $stage "train" -}}
{{- /* The launcher would kill the processes of a drained pod after 30 seconds. */ -}}
{{- $_ := set $usual "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" (max 30 (sub (int64 $size.graceSeconds) 30) | toString) -}}
{{- end -}}
{{- $own := mergeOverwrite $usual ($size.env | default dict) -}}
{{- $env := dict "root" $root "env" $own "digest" $digest "threads" (not $size.gpus) "limited" true -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "eagle3.run" $root }}-{{ $stage }}
  labels:
    {{- include "eagle3.jobLabels" $names | nindent 4 }}
    {{- with $values.queueName }}
    kueue.x-k8s.io/queue-name: {{ . | quote }}
    {{- end }}
  annotations:
    eagle3/store: {{ include "eagle3.store" $root | quote }}
    {{- if hasKey $values "ttlSeconds" }}
    # The runner sets it once the artefact is committed: a Job that failed stays and can be read.
    eagle3/ttl-seconds: {{ $values.ttlSeconds | int64 | quote }}
    {{- end }}
spec:
  {{- if .facts.indexed }}
  # Each pod walks all units of work and does those that nobody has finished: one that lives is
  # enough, and their number may change.
  completionMode: Indexed
  completions: {{ $size.workers | int64 }}
  parallelism: {{ $size.workers | int64 }}
  backoffLimitPerIndex: {{ $size.backoffLimit | int64 }}
  maxFailedIndexes: {{ $size.workers | int64 }}
  {{- else }}
  backoffLimit: {{ $size.backoffLimit | int64 }}
  {{- end }}
  # A pod that still saves its work is not doubled.
  podReplacementPolicy: Failed
  activeDeadlineSeconds: {{ $size.deadlineSeconds | int64 }}
  podFailurePolicy:
    rules:
      # A drained or preempted pod is nobody's fault.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      # What no retry can help. The rest counts against the limit: 69, 75, 77, 137, 143.
      - action: FailJob
        onExitCodes:
          containerName: gate
          operator: In
          values: [64, 65, 66, 77]
      - action: FailJob
        onExitCodes:
          containerName: stage
          operator: In
          # Not 77: its keys may have been changed since it began, and the next pod's gate tells.
          values: [64, 65, 66]
      # A machine that lacks something: another index may stand on a better one.
      {{- range list "gate" "stage" }}
      - action: {{ ternary "FailIndex" "FailJob" $.facts.indexed }}
        onExitCodes:
          containerName: {{ . }}
          operator: In
          values: [78]
      {{- end }}
  template:
    metadata:
      {{- include "eagle3.podMetadata" $names | nindent 6 }}
    spec:
      {{- include "eagle3.pod" (dict "root" $root "account" "stage") | nindent 6 }}
      terminationGracePeriodSeconds: {{ $size.graceSeconds | int64 }}
      {{- $selector := dict }}
      {{- if and $size.gpus $values.gpu.product }}
      {{- $_ := set $selector $values.gpu.productLabel $values.gpu.product }}
      {{- end }}
      {{- with mergeOverwrite $selector ($size.nodeSelector | default dict) }}
      nodeSelector: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- if or $size.gpus $values.tolerations }}
      tolerations:
        {{- if $size.gpus }}
        - key: {{ $values.gpu.resource }}
          operator: Exists
          effect: NoSchedule
        {{- end }}
        {{- with $values.tolerations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      {{- if .facts.indexed }}
      # A node each, as far as there are nodes; with all GPUs of a node requested it cannot be else.
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
              eagle3/run: {{ include "eagle3.runId" $root | quote }}
              eagle3/stage: {{ $stage }}
      {{- end }}
      initContainers:
        - name: gate
          image: {{ include "eagle3.image" (dict "root" $root "image" "gate") }}
          imagePullPolicy: {{ $values.imagePullPolicy }}
          command: [python, -m, jobs.gate, --stage, {{ $stage }}, --config, /etc/eagle3/run.yaml]
          env:
            {{- include "eagle3.env" $env | nindent 12 }}
          {{- include "eagle3.envFrom" $root | nindent 10 }}
          # Within what the stage itself asks for, so that it costs nothing more.
          resources:
            requests: {cpu: 50m, memory: 256Mi}
            limits: {memory: 512Mi}
          volumeMounts:
            {{- include "eagle3.volumeMounts" $volumes | nindent 12 }}
          {{- include "eagle3.container" . | nindent 10 }}
      containers:
        - name: stage
          image: {{ include "eagle3.image" (dict "root" $root "image" .facts.image) }}
          imagePullPolicy: {{ $values.imagePullPolicy }}
          command: [python, -m, jobs.{{ $stage }}, --config, /etc/eagle3/run.yaml]
          env:
            {{- include "eagle3.env" $env | nindent 12 }}
          {{- include "eagle3.envFrom" $root | nindent 10 }}
          resources:
            requests:
              cpu: {{ $size.cpu | quote }}
              memory: {{ include "eagle3.memory" $size }}
              ephemeral-storage: {{ $size.scratch }}
              {{- if $size.gpus }}
              {{ $values.gpu.resource }}: {{ $size.gpus | int64 | quote }}
              {{- end }}
            # No limit on processor time: an engine that is throttled misses its own deadlines.
            limits:
              memory: {{ include "eagle3.memory" $size }}
              ephemeral-storage: {{ $size.scratch }}
              {{- if $size.gpus }}
              {{ $values.gpu.resource }}: {{ $size.gpus | int64 | quote }}
              {{- end }}
          volumeMounts:
            {{- include "eagle3.volumeMounts" $volumes | nindent 12 }}
          {{- include "eagle3.container" . | nindent 10 }}
      volumes:
        {{- include "eagle3.volumes" $volumes | nindent 8 }}
{{- end -}}

{{/* All Jobs of the run as one JSON object, stage -> Job, in order: what the runner creates. */}}
{{- define "eagle3.jobs" -}}
{
{{- range $index, $facts := include "eagle3.stages" . | fromJsonArray }}
{{- if $index }},{{ end }}
{{ $facts.name | quote }}: {{ include "eagle3.job" (dict "root" $ "facts" $facts) | fromYaml | toJson }}
{{- end }}
}
{{- end -}}
