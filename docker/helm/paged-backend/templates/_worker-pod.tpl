{{/*
PodSpec of a worker: the ranks of another host. It has no probes: the process waits for its server
without a limit, and ends if it cannot work.
*/}}
{{- define "workerPod" -}}
{{- include "podHead" . }}
containers:
  - name: worker
    image: "{{ .Values.image.server.repository }}:{{ .Values.image.server.tag | default .Chart.AppVersion }}"
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    # LeaderWorkerSet's variables say where the server is, and which node this is.
    args: [paged-backend, worker, --cluster-key-file=/run/secrets/paged-cluster/key]
    {{- with include "podVariables" . | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    # The server has open requests until its time to end is over.
    lifecycle:
      preStop:
        exec: {command: [sleep, {{ sub .Values.server.terminationGracePeriodSeconds 5 | quote }}]}
    resources:
      {{- include "podResources" . | nindent 6 }}
    securityContext:
      {{- include "containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "podMounts" . | nindent 6 }}
volumes:
  {{- include "podVolumes" . | nindent 2 }}
{{- include "podPlacement" . }}
{{- end }}
