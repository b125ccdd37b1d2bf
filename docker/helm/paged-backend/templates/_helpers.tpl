{{- define "labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/name: paged-backend
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "serverLabels" -}}
app.kubernetes.io/name: paged-backend
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "workerLabels" -}}
app.kubernetes.io/name: paged-backend
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: worker
{{- end }}

{{- define "hasWorkers" -}}
{{- if gt (int .Values.server.nodes) 1 }}true{{ end }}
{{- end }}

{{/* A LeaderWorkerSet makes a headless Service of its own name, so it cannot be that of our Service. */}}
{{- define "workload" -}}
{{ .Release.Name }}-{{ if include "hasWorkers" . }}group{{ else }}server{{ end }}
{{- end }}

{{- define "workloadReference" -}}
{{- if include "hasWorkers" . -}}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "workload" . }}}
{{- else -}}
{apiVersion: apps/v1, kind: StatefulSet, name: {{ include "workload" . }}}
{{- end }}
{{- end }}

{{/* Name of the Service that gives each server's pod a name. */}}
{{- define "podService" -}}
{{ if include "hasWorkers" . }}{{ include "workload" . }}{{ else }}{{ .Release.Name }}-server-pods{{ end }}
{{- end }}

{{- define "gatewayLabels" -}}
app.kubernetes.io/name: paged-backend
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* Labels of the pods that listen on the gateway's port. */}}
{{- define "gatewayPodLabels" -}}
{{- include (eq .Values.gateway.mode "sidecar" | ternary "serverLabels" "gatewayLabels") . }}
{{- end }}

{{- define "isKserve" -}}
{{- if .Values.kserve.uri }}true{{ end }}
{{- end }}

{{/* KServe sends requests to port 8000 of a pod and asks for /health there. */}}
{{- define "gatewayPort" -}}
{{- if include "isKserve" . }}8000{{ else }}9000{{ end }}
{{- end }}

{{- define "tritonPort" -}}
{{- if include "isKserve" . }}8010{{ else }}8000{{ end }}
{{- end }}

{{- define "podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "containerSecurity" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Until no Service sends requests here any more; then SIGTERM begins the drain. */}}
{{- define "leaveServices" -}}
preStop:
  exec: {command: [sleep, "5"]}
{{- end }}

{{- define "pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "waitingMetric" -}}
{{ .Values.model.options.metrics_prefix | default "paged_" }}num_requests_waiting
{{- end }}

{{/* Highest number of servers that there can be. */}}
{{- define "maxServers" -}}
{{- if eq .Values.autoscaling.kind "none" }}{{ .Values.server.replicas }}{{ else }}{{ .Values.autoscaling.maxReplicas }}{{ end }}
{{- end }}
