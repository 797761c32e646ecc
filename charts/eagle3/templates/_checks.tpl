{{/* What the schema cannot say, each as a sentence: the value, what was wanted, what to do. */}}
{{- define "eagle3.checks" -}}
{{- $room := sub 39 (len (include "eagle3.runId" .)) -}}
{{- if gt (len .Release.Name) (int $room) -}}
{{- fail (printf "release name: wanted at most %d characters beside the run's id, found %q; give the release a shorter name." $room .Release.Name) -}}
{{- end -}}
{{- if and .Values.only (not .Values.run.id) -}}
{{- fail "run.id: wanted one together with `only`, found none; plain manifests are named once, so give the run a name." -}}
{{- end -}}
{{- $stages := list -}}
{{- range include "eagle3.stages" . | fromJsonArray -}}
{{- $stages = append $stages .name -}}
{{- end -}}
{{- range .Values.only -}}
{{- if not (has . $stages) -}}
{{- fail (printf "only: wanted stages of this run, found %q; set config.%s.enabled to true, or leave it out." . .) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch (include "eagle3.credentialInUrl" .) (.Values.config | toJson | replace "\\u0026" "&") -}}
{{- fail "config: wanted URLs without a password or a signature, found one that has it; put it into a Secret and name that in credentials.secretName." -}}
{{- end -}}
{{- $mounted := trimSuffix "/" .Values.weights.mountPath -}}
{{- $source := dig "verifier" "source" "" .Values.config -}}
{{- if and .Values.weights.claim (not (hasPrefix (printf "%s/" $mounted) (printf "%s/" (trimPrefix "file://" $source)))) -}}
{{- fail (printf "config.verifier.source: wanted a folder at or below %s beside weights.claim, found %q; name the verifier's folder on the claim, or leave the claim out." $mounted $source) -}}
{{- end -}}
{{- $accounts := .Values.serviceAccount -}}
{{- if and $accounts.annotations $accounts.stageName $accounts.runnerName -}}
{{- fail "serviceAccount.annotations: wanted none beside stageName and runnerName, whose accounts are not the chart's to change, found some; annotate those accounts, and leave these out." -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name (list "run" "scratch" "dshm" "weights") -}}
{{- fail (printf "extraVolumes: wanted names that the chart does not use itself, found %q; give the volume another." .name) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := .Values.podLabels -}}
{{- if or (hasPrefix "eagle3/" $key) (hasPrefix "app.kubernetes.io/" $key) -}}
{{- fail (printf "podLabels: wanted labels that the chart does not set itself, found %q; give it another name." $key) -}}
{{- end -}}
{{- end -}}
{{- include "eagle3.checkEnv" (dict "where" "env" "env" .Values.env) -}}
{{- range $stage, $size := .Values.stages -}}
{{- if and $size.gpus (not $size.shm) -}}
{{- fail (printf "stages.%s.shm: wanted a size beside gpus, found none; the usual 64 MB of /dev/shm end a collective with a bus error." $stage) -}}
{{- end -}}
{{- include "eagle3.checkEnv" (dict "where" (printf "stages.%s.env" $stage) "env" ($size.env | default dict)) -}}
{{- $tensor := dig $stage "engine" "tensor_parallel_size" 1 $.Values.config | int -}}
{{- if and (has $stage $stages) $size.gpus (gt $tensor (int $size.gpus)) -}}
{{- fail (printf "config.%s.engine.tensor_parallel_size: wanted at most stages.%s.gpus, %d, found %d; raise the one or lower the other." $stage $stage (int $size.gpus) $tensor) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- include "eagle3.checkEnv" (dict "where" "extraEnv" "env" (dict .name (.value | default ""))) -}}
{{- end -}}
{{- end -}}

{{/* A password before a host, or a signature that opens an object to whoever has the URL. */}}
{{- define "eagle3.credentialInUrl" -}}
://[^/@"]+:[^/@"]+@|[?&](X-Amz-Signature|X-Goog-Signature|Signature|sig)=
{{- end -}}

{{/* Takes where, env. */}}
{{- define "eagle3.checkEnv" -}}
{{- range $name, $value := .env -}}
{{- if has $name (list "EAGLE3_STORE" "EAGLE3_SCRATCH_BYTES" "NODE_NAME") -}}
{{- fail (printf "%s.%s: wanted no variable that the chart sets itself, found %q; remove it, and set `store` instead." $.where $name $value) -}}
{{- end -}}
{{- $named := regexMatch "(?i)(SECRET|CONNECTION_STRING|(^|_)(TOKEN|PASSWORD|PASSWD|PASSPHRASE|KEY)$)" $name -}}
{{- if and $value (not (hasSuffix "_FILE" $name)) (or $named (regexMatch (include "eagle3.credentialInUrl" $) $value)) -}}
{{- fail (printf "%s.%s: wanted no credential among the values, which anyone who reads the Job can read; put it into a Secret and name that in credentials.secretName." $.where $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An id that was given stands for what it was first given with: its objects are immutable.
     Takes root, data (of the ConfigMap that is about to be applied). */}}
{{- define "eagle3.checkUnchanged" -}}
{{- $name := include "eagle3.run" .root -}}
{{- $standing := lookup "v1" "ConfigMap" .root.Release.Namespace $name -}}
{{- if $standing -}}
{{- range $key, $text := .data -}}
{{- if ne (trim $text) (trim (index $standing.data $key | default "")) -}}
{{- fail (printf "run.id: wanted the values and the version of the chart that this run was started with, found others (%s of the ConfigMap %s differs); give the new run an id of its own, or see docs/cluster.md on going on with other values." $key $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
