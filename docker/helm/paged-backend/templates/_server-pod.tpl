{{/* PodSpec of a server. KServe puts models into the container `main`. */}}
{{- define "serverPod" -}}
{{- $ready := dict "path" (printf "/v2/models/%s/ready" .Values.model.name) "port" (include "tritonPort" . | int) "scheme" "HTTP" -}}
serviceAccountName: {{ .Release.Name }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "pullSecrets" . }}
{{ . }}
{{- end }}
securityContext:
  {{- include "podSecurity" . | nindent 2 }}
terminationGracePeriodSeconds: {{ .Values.server.terminationGracePeriodSeconds }}
{{- with .Values.server.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
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
      {{- with .Values.huggingFace }}
      {{- if .secret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}
      {{- end }}
      {{- end }}
      {{- with .Values.server.env }}
      {{- toYaml . | nindent 6 }}
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
      {{- $resources := deepCopy .Values.server.resources }}
      {{- if .Values.server.gpus }}
      {{- $gpus := dict "limits" (dict .Values.server.gpuResource .Values.server.gpus) }}
      {{- $resources = mergeOverwrite $resources $gpus }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
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
      - {name: cache, mountPath: /cache}
      - {name: shared-memory, mountPath: /dev/shm}
      - {name: tmp, mountPath: /tmp}
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
  {{- if or (not .Values.cache.persistent) (include "isKserve" .) }}
  - name: cache
    emptyDir: {sizeLimit: {{ .Values.cache.size }}}
  {{- end }}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.server.sharedMemory }}}
  - name: tmp
    emptyDir: {sizeLimit: 256Mi}
  {{- if eq .Values.gateway.mode "sidecar" }}
  {{- include "gatewayVolumes" . | nindent 2 }}
  {{- end }}
{{- with .Values.server.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.server.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
