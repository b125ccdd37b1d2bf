{{/* PodSpec of a server. KServe puts models into the container `main`. */}}
{{- define "serverPod" -}}
{{- $ready := dict "path" (printf "/v2/models/%s/ready" .Values.model.name) "port" (include "tritonPort" . | int) "scheme" "HTTP" -}}
{{- include "podHead" . }}
containers:
  - name: main
    image: "{{ .Values.image.server.repository }}:{{ .Values.image.server.tag | default .Chart.AppVersion }}"
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    {{- if include "isKserve" . }}
    # KServe's own command and arguments would be taken where there are none.
    command: [/opt/nvidia/nvidia_entrypoint.sh, /opt/paged/bin/python, /opt/paged/entrypoint.py]
    args: {{ concat (list "--log-verbose=0") .Values.server.args | toJson }}
    {{- else }}
    args: {{ .Values.server.args | toJson }}
    {{- end }}
    env:
      - {name: PAGED_MODELS, value: /repository}
      - {name: PAGED_HTTP_PORT, value: {{ include "tritonPort" . | quote }}}
      {{- with include "podVariables" . | trim }}
      {{- . | nindent 6 }}
      {{- end }}
    ports:
      - {name: triton-http, containerPort: {{ include "tritonPort" . }}}
      - {name: triton-grpc, containerPort: 8001}
      - {name: triton-metrics, containerPort: 8002}
    startupProbe:
      httpGet: {{ $ready | toJson }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ div .Values.server.startupSeconds 10 }}
    readinessProbe:
      httpGet: {{ $ready | toJson }}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    # The same question with more patience. A model is not ready while its engine starts again, and
    # stays so if a front end has ended, which Triton does not start again.
    livenessProbe:
      httpGet: {{ $ready | toJson }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ div .Values.server.unreadySeconds 10 }}
    lifecycle:
      {{- include "leaveServices" . | nindent 6 }}
    resources:
      {{- include "podResources" . | nindent 6 }}
    securityContext:
      {{- include "containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- if .Values.model.existingClaim }}
      - {name: repository, mountPath: /repository, readOnly: true}
      {{- else }}
      # Single files: a folder of a ConfigMap has others in it, which Triton would take for models.
      - name: repository
        mountPath: /repository/{{ .Values.model.name }}/config.pbtxt
        subPath: config.pbtxt
        readOnly: true
      - name: repository
        mountPath: /repository/{{ .Values.model.name }}/1/model.json
        subPath: model.json
        readOnly: true
      {{- end }}
      {{- include "podMounts" . | nindent 6 }}
  {{- if eq .Values.gateway.mode "sidecar" }}
  - {{- include "gatewayContainer" . | nindent 4 }}
  {{- end }}
volumes:
  - name: repository
    {{- if .Values.model.existingClaim }}
    persistentVolumeClaim: {claimName: {{ .Values.model.existingClaim }}, readOnly: true}
    {{- else }}
    configMap: {name: {{ .Release.Name }}-model}
    {{- end }}
  {{- include "podVolumes" . | nindent 2 }}
  {{- if eq .Values.gateway.mode "sidecar" }}
  {{- include "gatewayVolumes" . | nindent 2 }}
  {{- end }}
{{- include "podPlacement" . }}
{{- end }}
