{{- define "gatewayContainer" -}}
name: gateway
image: "{{ .Values.image.clients.repository }}:{{ .Values.image.clients.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  - paged-backend
  - gateway
  - --host=0.0.0.0
  - --port={{ include "gatewayPort" . }}
  {{- if eq .Values.gateway.mode "sidecar" }}
  - --triton=127.0.0.1:8001
  - --triton-metrics=127.0.0.1:8002 # routers read the metrics at the port of requests
  {{- else }}
  # Each server by its own name: a connection to a Service would stay with one of them.
  {{- range until (include "maxServers" . | int) }}
  - --triton={{ include "workload" $ }}-{{ . }}.{{ include "podService" $ }}:8001
  {{- end }}
  {{- end }}
  {{- if .Values.gateway.apiKeys.secret }}
  - --api-key-file=/run/secrets/paged-backend/api_keys
  {{- end }}
  {{- if include "isKserve" . }}
  # KServe's routes by model use the second name.
  - --served-model-name
  - {{ .Values.model.name }}
  - publishers/{{ .Release.Namespace }}/models/{{ .Values.model.name }}
  {{- end }}
  {{- range .Values.gateway.args }}
  - {{ . | quote }}
  {{- end }}
ports:
  - {name: openai, containerPort: {{ include "gatewayPort" . }}}
startupProbe:
  httpGet: {path: /health/live, port: {{ include "gatewayPort" . }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 30
readinessProbe: # 200 while any server answers
  httpGet: {path: /health/ready, port: {{ include "gatewayPort" . }}}
  periodSeconds: 5
  timeoutSeconds: 6
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health/live, port: {{ include "gatewayPort" . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  {{- include "leaveServices" . | nindent 2 }}
resources:
  {{- toYaml .Values.gateway.resources | nindent 2 }}
securityContext:
  {{- include "containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: gateway-tmp, mountPath: /tmp}
  {{- if .Values.gateway.apiKeys.secret }}
  - {name: api-keys, mountPath: /run/secrets/paged-backend, readOnly: true}
  {{- end }}
{{- end }}

{{- define "gatewayVolumes" -}}
- name: gateway-tmp
  emptyDir: {sizeLimit: 64Mi}
{{- with .Values.gateway.apiKeys }}
{{- if .secret }}
- name: api-keys
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items: [{key: {{ .key }}, path: api_keys}]
{{- end }}
{{- end }}
{{- end }}
