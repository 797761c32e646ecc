{{/* What every pod of ours says of itself; Pod Security "restricted" asks for most of it.
     Takes root, and account: stage or runner. */}}
{{- define "eagle3.pod" -}}
serviceAccountName: {{ include "eagle3.account" . | quote }}
automountServiceAccountToken: {{ eq .account "runner" }}
enableServiceLinks: false
restartPolicy: Never
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.podSecurityContext }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  # A claim of hundreds of gigabytes is not walked through at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The labels and annotations of a pod. Takes root, component, which is a stage or runner. */}}
{{- define "eagle3.podMetadata" -}}
labels:
  {{- include "eagle3.jobLabels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What every container says of itself. */}}
{{- define "eagle3.container" -}}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* The environment, the same in a stage and in its gate: one identity, or the gate proves nothing.
     Everything that writes is sent to the volume /scratch. Without a GPU there are as many threads as
     processors were asked for, rounded up: two engines that each take all of a node wait for each
     other's threads. Whoever downloads a verifier is told what the pod may hold: the disk below is the
     node's and larger. Takes root, env, digest, threads, and limited in a stage's Job. */}}
{{- define "eagle3.env" -}}
{{- $usual := dict
  "HOME" "/scratch"
  "USER" "eagle3"
  "TMPDIR" "/scratch"
  "XDG_CACHE_HOME" "/scratch/cache"
  "HF_HOME" "/scratch/cache/huggingface"
  "VLLM_CACHE_ROOT" "/scratch/cache/vllm"
  "TORCHINDUCTOR_CACHE_DIR" "/scratch/cache/inductor"
  "TRITON_CACHE_DIR" "/scratch/cache/triton"
  "NUMBA_CACHE_DIR" "/scratch/cache/numba"
  "MPLCONFIGDIR" "/scratch/cache/matplotlib"
  "PYTHONDONTWRITEBYTECODE" "1" -}}
{{- $env := mergeOverwrite $usual .root.Values.env (.env | default dict) -}}
{{- if .digest -}}
{{- $_ := set $env "EAGLE3_IMAGE_DIGEST" .digest -}}
{{- end -}}
- name: EAGLE3_STORE
  value: {{ include "eagle3.store" .root | quote }}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if and .limited (or (eq $env.TMPDIR "/scratch") (hasPrefix "/scratch/" $env.TMPDIR)) }}
- name: EAGLE3_SCRATCH_BYTES
  valueFrom:
    resourceFieldRef:
      containerName: stage
      resource: limits.ephemeral-storage
{{- end }}
{{- if and .threads (not (hasKey $env "OMP_NUM_THREADS")) }}
- name: OMP_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: stage
      resource: requests.cpu
{{- end }}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Credentials of the object store: by reference only. */}}
{{- define "eagle3.envFrom" -}}
{{- with .Values.credentials.secretName }}
envFrom:
  - secretRef:
      name: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Volumes, and below them the mounts. Takes root, scratch, shm, weights. */}}
{{- define "eagle3.volumes" -}}
- name: run
  configMap:
    name: {{ include "eagle3.run" .root | quote }}
- name: scratch
  emptyDir:
    sizeLimit: {{ .scratch }}
{{- with .shm }}
- name: dshm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- if .weights }}
- name: weights
  persistentVolumeClaim:
    claimName: {{ .root.Values.weights.claim | quote }}
    readOnly: true
{{- end }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "eagle3.volumeMounts" -}}
- name: run
  mountPath: /etc/eagle3
  readOnly: true
- name: scratch
  mountPath: /scratch
{{- if .shm }}
- name: dshm
  mountPath: /dev/shm
{{- end }}
{{- if .weights }}
- name: weights
  mountPath: {{ .root.Values.weights.mountPath }}
  readOnly: true
{{- end }}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The memory limit: pages of /dev/shm are charged to whoever wrote them, so they are added.
     Takes memory, shm. */}}
{{- define "eagle3.memory" -}}
{{- if .shm -}}
{{- printf "%dMi" (add (include "eagle3.mebibytes" .memory) (include "eagle3.mebibytes" .shm)) -}}
{{- else -}}
{{- .memory -}}
{{- end -}}
{{- end -}}

{{- define "eagle3.mebibytes" -}}
{{- if hasSuffix "Gi" . -}}
{{- mul 1024 (trimSuffix "Gi" . | int) -}}
{{- else -}}
{{- trimSuffix "Mi" . | int -}}
{{- end -}}
{{- end -}}
