{{/* The run's id: given, or made of everything that its configuration and its Jobs are made of: the
     chart's version too, which is the usual tag of the images. What surrounds a run may be corrected
     while it goes on. */}}
{{- define "eagle3.runId" -}}
{{- $own := omit .Values "global" "networkPolicy" "runner" "serviceAccount" -}}
{{- with .Values.serviceAccount.stageName -}}
{{- $_ := set $own "stageAccount" . -}}
{{- end -}}
{{- .Values.run.id | default (printf "%s %s" .Chart.Version (toJson $own) | sha256sum | trunc 8) -}}
{{- end -}}

{{/* The name of a run's objects; eagle3.checks refuses a release whose name would not fit. */}}
{{- define "eagle3.run" -}}
{{- printf "%s-%s" .Release.Name (include "eagle3.runId" .) -}}
{{- end -}}

{{/* The service account of a pod: one that exists, or the release's own. Takes root, account: stage
     or runner. */}}
{{- define "eagle3.account" -}}
{{- $given := index .root.Values.serviceAccount (printf "%sName" .account) -}}
{{- $given | default (printf "%s-%s" .root.Release.Name .account) -}}
{{- end -}}

{{- define "eagle3.store" -}}
{{- printf "%s/%s" (trimSuffix "/" .Values.store) (include "eagle3.runId" .) -}}
{{- end -}}

{{/* What selects an object: never its version or who made it. Takes root, component. */}}
{{- define "eagle3.selector" -}}
app.kubernetes.io/name: eagle3
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of a release's own object. Takes root, component. */}}
{{- define "eagle3.labels" -}}
{{ include "eagle3.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ ternary "kubectl" .root.Release.Service (hasKey .root.Values "only") }}
{{- if hasKey .root.Values "only" }}
eagle3/stage: shared
{{- end }}
{{- end -}}

{{/* Labels of a Job of the run, or of its pods. Takes root, component, which is a stage or runner. */}}
{{- define "eagle3.jobLabels" -}}
{{ include "eagle3.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ ternary "kubectl" "eagle3" (hasKey .root.Values "only") }}
eagle3/run: {{ include "eagle3.runId" .root | quote }}
eagle3/stage: {{ .component }}
{{- end -}}

{{/* An image by its digest, else by its tag, else by the chart's version. Takes root, image. */}}
{{- define "eagle3.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest | quote -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) | quote -}}
{{- end -}}
{{- end -}}

{{/* The stages of this run, in order, as JSON. */}}
{{- define "eagle3.stages" -}}
{{- $stages := list -}}
{{- range .Files.Get "files/stages.json" | fromJsonArray -}}
{{- $wanted := or (not .optional) (dig .name "enabled" true $.Values.config) -}}
{{- if and $wanted (has .name ($.Values.only | default (list .name))) -}}
{{- $stages = append $stages . -}}
{{- end -}}
{{- end -}}
{{- $stages | toJson -}}
{{- end -}}
