{{/* The configuration file. What the chart decides itself overrules .Values.config; the schema allows nothing twice. */}}

{{- define "moonpool.ownConfig" -}}
{{- $security := dict -}}
{{- if eq .Values.tls.mode "csi" -}}
{{- $_ := set $security "tls" "files" -}}
{{- $_ := set $security "tls_dir" "/run/moonpool/tls" -}}
{{- else if .Values.tls.trustNetwork -}}
{{- $_ := set $security "allow_plain" true -}}
{{- else -}}
{{- fail "tls.mode: off would let whoever reaches a pod stop the cluster and read its KV; use csi, or set tls.trustNetwork=true on a network that you trust wholly" -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $security "api_keys_file" (printf "/etc/moonpool/api-keys/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- if .Values.https.existingSecret -}}
{{- $_ := set $security "https_cert" "/etc/moonpool/https/tls.crt" -}}
{{- $_ := set $security "https_key" "/etc/moonpool/https/tls.key" -}}
{{- end -}}
{{- if .Values.etcd.tls.existingSecret -}}
{{- $_ := set $security "etcd_ca" "/etc/moonpool/etcd-tls/ca.crt" -}}
{{- if .Values.etcd.tls.clientCertificate -}}
{{- $_ := set $security "etcd_cert" "/etc/moonpool/etcd-tls/tls.crt" -}}
{{- $_ := set $security "etcd_key" "/etc/moonpool/etcd-tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if .Values.etcd.user -}}
{{- $_ := set $security "etcd_user" .Values.etcd.user -}}
{{- $_ := set $security "etcd_password_file" (printf "/etc/moonpool/etcd-user/%s" .Values.etcd.password.key) -}}
{{- end -}}
{{- if .Values.kvEncryption -}}
{{- $_ := set $security "kv_encryption" "aes-gcm" -}}
{{- $_ := set $security "kv_key_file" "/etc/moonpool/keys/kv.key" -}}
{{- end -}}
{{- $store := dict "pool_bytes" (mul (int64 .Values.store.poolGiB) 1073741824) "drain_ms" .Values.drain.storeMs -}}
{{- if include "moonpool.shared" . -}}
{{- $_ := set $store "directory" "/run/moonpool/host" -}}
{{- end -}}
{{- if .Values.store.ssd.enabled -}}
{{- $_ := set $store "ssd_path" "/run/moonpool/ssd" -}}
{{- $_ := set $store "ssd_bytes" (mul (int64 .Values.store.ssd.gib) 1073741824) -}}
{{- end -}}
{{- $model := dict "path" .Values.model.path -}}
{{- with .Values.model.name -}}{{- $_ := set $model "name" . -}}{{- end -}}
{{- $cluster := dict "name" (include "moonpool.cluster" .) "registry" (include "moonpool.registry" .) "state_dir" "/run/moonpool/state" "key_file" "/etc/moonpool/keys/hash.key" -}}
{{- $_ := set $cluster "port" .Values.ports.control -}}
{{- $_ := set $cluster "probe_port" .Values.ports.probe -}}
{{- $transfer := dict "port" .Values.ports.data -}}
{{- if .Values.rdma.enabled -}}
{{- $_ := set $transfer "ucx_tls" .Values.rdma.ucxTls -}}
{{- $_ := set $transfer "ucx_net_devices" .Values.rdma.netDevices -}}
{{- end -}}
{{- dict "cluster" $cluster "gateway" (dict "host" "0.0.0.0" "port" .Values.ports.http "drain_ms" .Values.drain.gatewayMs) "model" $model "observe" (dict "log_to" "stderr") "security" $security "store" $store "timing" (dict "drain_ms" .Values.drain.workersMs) "transfer" $transfer | toYaml -}}
{{- end }}

{{- define "moonpool.toml" -}}
{{- $all := mergeOverwrite (deepCopy .Values.config) (include "moonpool.ownConfig" . | fromYaml) -}}
{{- include "moonpool.tomlOf" $all -}}
{{- end }}

{{/* What `moonpool up` gets inside a Ray cluster: which node ids there are, and ports that begin elsewhere. */}}
{{- define "moonpool.rayToml" -}}
{{- $root := . -}}
{{- $nodes := list -}}
{{- $cpus := dict -}}
{{- range $name := keys .Values.workers | sortAlpha -}}
{{- $g := include "moonpool.group" (dict "root" $root "group" (get $root.Values.workers $name)) | fromYaml -}}
{{- $_ := set $cpus $g.role $g.rayCpus -}}
{{- range $i := until (int $g.replicas) -}}
{{- $nodes = append $nodes (dict "name" (printf "%s-%d" $name $i) $g.role (int $g.processes) "labels" (dict "moonpool-group" $name)) -}}
{{- end -}}
{{- end -}}
{{- $cluster := dict "launcher" "ray" "ray_address" "auto" "ray_strategy" "STRICT_SPREAD" "ray_cpus" $cpus "ray_gpus_per_worker" .Values.engine.kuberay.gpusPerWorker "ray_place_ms" (mul 1000 (int64 .Values.engine.kuberay.placeSeconds)) "host" "auto" "probe_host" "auto" "port" .Values.ports.ray.control "probe_port" .Values.ports.ray.probe "nodes" $nodes -}}
{{- $own := mergeOverwrite (include "moonpool.ownConfig" . | fromYaml) (dict "cluster" $cluster "transfer" (dict "port" .Values.ports.ray.data)) -}}
{{- include "moonpool.tomlOf" (mergeOverwrite (deepCopy .Values.config) $own) -}}
{{- end }}

{{- define "moonpool.tomlOf" -}}
{{- $all := . -}}
{{- range $section := keys $all | sortAlpha }}
{{- $values := get $all $section }}
{{- if $values }}
[{{ $section }}]
{{- range $key := keys $values | sortAlpha }}
{{- $value := get $values $key }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "moonpool.tomlValue" $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end }}
{{- end }}

{{/* One value: JSON is TOML but for tables and whole numbers that YAML reads as floats (which toJson writes as whole ones). */}}
{{- define "moonpool.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- $map := . -}}{{- range $i, $key := keys $map | sortAlpha -}}{{- if $i }},{{ end }} {{ toJson $key }} = {{ include "moonpool.tomlValue" (get $map $key) }}{{- end }} }
{{- else if kindIs "slice" . -}}
[{{- range $i, $one := . -}}{{- if $i }}, {{ end }}{{ include "moonpool.tomlValue" $one }}{{- end -}}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}
