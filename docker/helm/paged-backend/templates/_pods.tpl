{{/* What the pods of servers and of workers have in common. */}}
{{- define "podHead" -}}
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
{{- end }}

{{- define "podVariables" -}}
{{- with .Values.huggingFace }}
{{- if .secret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- with .Values.server.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "podResources" -}}
{{- $resources := deepCopy .Values.server.resources }}
{{- if .Values.server.gpus }}
{{- $gpus := dict "limits" (dict .Values.server.gpuResource .Values.server.gpus) }}
{{- $resources = mergeOverwrite $resources $gpus }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "podMounts" -}}
- {name: cache, mountPath: /cache}
- {name: shared-memory, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- if include "hasWorkers" . }}
- {name: cluster-key, mountPath: /run/secrets/paged-cluster, readOnly: true}
{{- end }}
{{- end }}

{{- define "podVolumes" -}}
{{- if or (not .Values.cache.persistent) (include "isKserve" .) -}}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
{{ end -}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.server.sharedMemory }}}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- if include "hasWorkers" . }}
- name: cluster-key
  secret:
    secretName: {{ .Values.clusterKey.secret }}
    defaultMode: 0440
    items: [{key: {{ .Values.clusterKey.key }}, path: key}]
{{- end }}
{{- end }}

{{- define "podPlacement" -}}
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

{{/* Template of a server's pod. */}}
{{- define "serverTemplate" -}}
metadata:
  labels:
    {{- include "serverLabels" . | nindent 4 }}
    {{- with .Values.server.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: main
    # A change of the model starts the pods anew.
    checksum/model: {{ include (print $.Template.BasePath "/model-repository.yaml") . | sha256sum }}
    {{- with .Values.server.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "serverPod" . | nindent 2 }}
{{- end }}

{{- define "cacheClaims" -}}
{{- if .Values.cache.persistent }}
volumeClaimTemplates:
  - apiVersion: v1
    kind: PersistentVolumeClaim
    metadata:
      name: cache
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .Values.cache.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests: {storage: {{ .Values.cache.size }}}
{{- end }}
{{- end }}
