{{/* The store node's container: one per host (a DaemonSet), or beside the workers of one pod (a sidecar). */}}

{{/* (root, sidecar) */}}
{{- define "moonpool.storeContainer" -}}
{{- $root := .root }}
{{- $s := .root.Values.store }}
{{- $ports := .root.Values.ports }}
name: store
image: {{ include "moonpool.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: [moonpool]
{{- if .sidecar }}
args: [run, store, --id, store-$(POD_NAME), --node, $(POD_NAME), --config, /etc/moonpool/config/moonpool.toml]
restartPolicy: Always  # a sidecar: there before the workers, and until they have left
{{- else if eq $root.Values.tls.mode "csi" }}
args: [run, store, --id, $(POD_NAME), --node, $(NODE_NAME), --config, /etc/moonpool/config/moonpool.toml]
{{- else }}
args: [run, store, --id, store-$(NODE_NAME), --node, $(NODE_NAME), --config, /etc/moonpool/config/moonpool.toml]
{{- end }}
env:
  {{- include "moonpool.env" $root | nindent 2 }}
  {{- if .sidecar }}
  - {name: MOONPOOL_CLUSTER_PORT, value: {{ $ports.sidecarControl | quote }}}
  - {name: MOONPOOL_CLUSTER_PROBE_PORT, value: {{ $ports.sidecarProbe | quote }}}
  {{- else }}
  - {name: MOONPOOL_CLUSTER_STATE_DIR, value: /run/moonpool/host}
  {{- end }}
ports:
  {{- if .sidecar }}
  - {name: store-control, containerPort: {{ $ports.sidecarControl }}}
  - {name: store-probe, containerPort: {{ $ports.sidecarProbe }}}
  {{- else }}
  - {name: control, containerPort: {{ $ports.control }}}
  - {name: probe, containerPort: {{ $ports.probe }}}
  {{- end }}
  - {name: data, containerPort: {{ $ports.data }}}
{{- include "moonpool.probes" (dict "root" $root "port" (ternary "store-probe" "probe" .sidecar)) | nindent 0 }}
resources:
  {{- include "moonpool.storeResources" $root | nindent 2 }}
securityContext:
  {{- include "moonpool.containerSecurity" (dict "root" $root "rdma" $root.Values.rdma.enabled) | nindent 2 }}
volumeMounts:
  {{- include "moonpool.mounts" (dict "root" $root "store" true "sidecar" .sidecar) | nindent 2 }}
  {{- include "moonpool.storeMounts" $root | nindent 2 }}
  {{- if $s.ssd.enabled }}
  - {name: ssd, mountPath: /run/moonpool/ssd}
  {{- end }}
{{- end }}

{{/* Where region files and sockets are, at the same place in every container that shares them: the store node names paths. */}}
{{- define "moonpool.storeMounts" -}}
{{- if include "moonpool.shared" . }}
- {name: host, mountPath: /run/moonpool/host}
{{- else }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if .Values.store.hugepages.amount }}
- {name: hugepages, mountPath: /dev/hugepages}
{{- end }}
{{- end }}

{{/* The pool lies in memory files, which count for whoever touches them first: the store node. */}}
{{- define "moonpool.storeResources" -}}
{{- $s := .Values.store -}}
{{- $memory := printf "%dGi" (int64 (add (int64 $s.poolGiB) (int64 $s.overheadGiB))) -}}
{{- $requests := dict "cpu" $s.cpu "memory" $memory -}}
{{- $limits := dict "memory" $memory -}}
{{- if $s.hugepages.amount -}}
{{- $_ := set $requests (printf "hugepages-%s" $s.hugepages.size) $s.hugepages.amount -}}
{{- $_ := set $limits (printf "hugepages-%s" $s.hugepages.size) $s.hugepages.amount -}}
{{- end -}}
{{- if .Values.rdma.enabled -}}
{{- $_ := set $requests .Values.rdma.resource .Values.rdma.count -}}
{{- $_ := set $limits .Values.rdma.resource .Values.rdma.count -}}
{{- end -}}
{{- dict "requests" $requests "limits" $limits | toYaml -}}
{{- end }}

{{- define "moonpool.shmVolume" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ printf "%dMi" (int64 (add (mul (int64 .Values.store.poolGiB) 1024) (int64 .Values.store.shmSpareMiB))) }}
{{- end }}

{{- define "moonpool.hugepagesVolume" -}}
{{- with .Values.store.hugepages }}
{{- if .amount }}
- name: hugepages
  emptyDir:
    medium: HugePages-{{ .size }}
{{- end }}
{{- end }}
{{- end }}
