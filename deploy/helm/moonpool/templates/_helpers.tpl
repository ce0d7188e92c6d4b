{{/* Names. */}}

{{- define "moonpool.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{- define "moonpool.fullname" -}}
{{- $full := printf "%s-%s" .Release.Name (include "moonpool.name" .) -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if contains (include "moonpool.name" .) .Release.Name -}}
{{- $full = .Release.Name -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- fail (printf "fullnameOverride: Services cannot be called %q, which begins with no letter; set fullnameOverride" $full) -}}
{{- end -}}
{{- $full | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{/* What the processes call their cluster: several releases with one name and one etcd are one cluster. */}}
{{- define "moonpool.cluster" -}}
{{- default .Release.Name .Values.cluster.name -}}
{{- end }}

{{- define "moonpool.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "moonpool.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ include "moonpool.cluster" . | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* (root, component, group) -> labels that pods are found by; group may be empty. */}}
{{- define "moonpool.selector" -}}
app.kubernetes.io/name: {{ include "moonpool.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
moonpool-group: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "moonpool.image" -}}
{{- $i := .Values.image -}}
{{- if $i.digest -}}
{{ $i.repository }}@{{ $i.digest }}
{{- else -}}
{{ $i.repository }}:{{ default .Chart.AppVersion $i.tag }}
{{- end -}}
{{- end }}

{{/* A group of workers with what `workerDefaults` says where it is silent: (root, group) -> YAML. */}}
{{- define "moonpool.group" -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy .group) | toYaml -}}
{{- end }}

{{/* Seconds to end in. Each must outlast preStop and what the role does while it leaves (docs/operations.md). */}}

{{- define "moonpool.seconds" -}}
{{- div (add (int64 .) 999) 1000 -}}
{{- end }}

{{- define "moonpool.grace.gateway" -}}
{{- add (int64 .Values.gateway.preStopSeconds) (int64 (include "moonpool.seconds" .Values.drain.gatewayMs)) (int64 .Values.drain.closeSeconds) -}}
{{- end }}

{{- define "moonpool.grace.worker" -}}
{{- add (int64 (include "moonpool.seconds" .Values.drain.workersMs)) (int64 .Values.drain.closeSeconds) -}}
{{- end }}

{{/* It waits for its host's workers and for what is landing; then it moves blocks away. */}}
{{- define "moonpool.grace.store" -}}
{{- add (int64 (include "moonpool.seconds" .Values.drain.workersMs)) (mul 2 (int64 (include "moonpool.seconds" .Values.drain.storeMs))) (int64 .Values.drain.closeSeconds) -}}
{{- end }}

{{/* etcd as cluster.registry names it. */}}
{{- define "moonpool.registry" -}}
{{- if .Values.etcd.bundled.enabled -}}
etcd://{{ include "moonpool.fullname" . }}-etcd:2379
{{- else if .Values.etcd.endpoints -}}
{{ ternary "etcds" "etcd" (ne .Values.etcd.tls.existingSecret "") }}://{{ join "," .Values.etcd.endpoints }}{{ .Values.etcd.prefix }}
{{- else -}}
{{- fail "etcd.endpoints: empty; name host:port of an etcd, or set etcd.bundled.enabled=true for a trial" -}}
{{- end -}}
{{- end }}

{{/* Whether store nodes are one per host, shared by its pods, or one in each pod of workers. */}}
{{- define "moonpool.shared" -}}
{{- if and (eq .Values.engine.mode "plain") (eq .Values.store.sharing "host") -}}yes{{- end -}}
{{- end }}

{{/* The folder of the host that a node's pods share: region files, sockets, the store node's lock. */}}
{{- define "moonpool.hostFolder" -}}
{{ printf "%s/%s-%s" .Values.store.hostPath .Release.Namespace (include "moonpool.cluster" .) }}
{{- end }}

{{- define "moonpool.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "moonpool.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "moonpool.url" -}}
{{ ternary "https" "http" (ne .Values.https.existingSecret "") }}://{{ include "moonpool.fullname" . }}:{{ .Values.gateway.service.port }}
{{- end }}
