{{/* Ray pods: their store nodes and workers are actors in them, so they share memory and process numbers by themselves. */}}

{{/* (root, api) */}}
{{- define "moonpool.rayPodHead" -}}
{{- include "moonpool.podHead" (dict "root" .root "api" .api "grace" (add (int64 (include "moonpool.grace.worker" .root)) (int64 (include "moonpool.grace.store" .root)))) }}
restartPolicy: Never  # the autoscaler replaces pods
{{- end }}

{{- define "moonpool.rayContainer" -}}
image: {{ include "moonpool.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - {name: HOME, value: /home/moonpool}
  - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
  - {name: RAY_memory_monitor_refresh_ms, value: "0"}  # it would kill workers for what the pool holds
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Words of a command line, for a shell. */}}
{{- define "moonpool.shellWords" -}}
{{- range $i, $word := . -}}
{{- if $i }} {{ end -}}
{{- if regexMatch "^[A-Za-z0-9_./:=,@%+-]+$" $word -}}{{ $word }}{{- else -}}'{{ $word | replace "'" "'\\''" }}'{{- end -}}
{{- end -}}
{{- end }}

{{/* (root, wait): the pod that hands a job to Ray and follows it. wait: once gateways serve. */}}
{{- define "moonpool.submitter" -}}
{{- $wait := .wait }}
{{- with .root -}}
metadata:
  labels:
    {{- include "moonpool.labels" . | nindent 4 }}
    app.kubernetes.io/component: ray-submitter
spec:
  restartPolicy: Never
  {{- include "moonpool.podHead" (dict "root" . "grace" 30) | nindent 2 }}
  {{- if $wait }}
  initContainers:
    - {{ include "moonpool.waitContainer" . | nindent 6 | trim }}
  {{- end }}
  containers:
    - name: submitter
      image: {{ include "moonpool.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      env:
        - {name: HOME, value: /tmp}
        - {name: RAY_AUTH_MODE, value: token}
        - name: RAY_AUTH_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ default (printf "%s-ray" (include "moonpool.fullname" .)) .Values.engine.kuberay.tokenSecret | quote }}, key: auth_token}
      resources:
        requests: {cpu: 100m, memory: 256Mi}
        limits: {memory: 1Gi}
      securityContext:
        {{- include "moonpool.containerSecurity" (dict "root" . "rdma" false) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
{{- end }}
{{- end }}
