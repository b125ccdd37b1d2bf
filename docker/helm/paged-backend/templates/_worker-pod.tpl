{{/*
PodSpec of a worker: the ranks of another host. Its process ends if it cannot work. Whenever its
server ends, it waits for the next one without a limit, so there is only a startup probe.
*/}}
{{- define "workerPod" -}}
{{- include "podHead" . }}
containers:
  - name: worker
    image: "{{ .Values.image.server.repository }}:{{ .Values.image.server.tag | default .Chart.AppVersion }}"
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    # LeaderWorkerSet's variables say where the server is, and which node this is.
    args: [paged-backend, worker, --cluster-key-file=/run/secrets/paged-cluster/key, --joined-file=/tmp/joined]
    # A pod that cannot reach its server starts again, for example where its name was resolved too early.
    startupProbe:
      exec: {command: [test, -e, /tmp/joined]}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ div .Values.server.startupSeconds 10 }}
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
