{{- define "regraft.name" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains "regraft" .Release.Name -}}{{ .Release.Name | trunc 34 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-regraft" (.Release.Name | trunc 26 | trimSuffix "-") }}
{{- end -}}
{{- end -}}

{{/* Takes (dict "root" $ "component" "api"). */}}
{{- define "regraft.selector" -}}
app.kubernetes.io/name: regraft
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Of resources, not of pods: a new version of the chart would restart them. */}}
{{- define "regraft.labels" -}}
{{ include "regraft.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Annotations of a Deployment. Begins with a new line. */}}
{{- define "regraft.deploymentAnnotations" -}}
{{- with .Values.deploymentAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Takes (dict "root" $ "image" "worker-gpu"). */}}
{{- define "regraft.image" -}}
{{- with .root.Values.image }}{{ with .registry }}{{ . }}/{{ end }}{{ .repository }}/{{ $.image }}{{ with index .digests $.image }}@{{ . }}{{ else }}:{{ .tag | default $.root.Chart.AppVersion }}{{ end }}{{ end -}}
{{- end -}}

{{- define "regraft.podSecurity" -}}
runAsNonRoot: true
{{- if .root.Values.fixedUser }}
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "regraft.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What a number, a text or a limit looks like in an environment variable. Helm reads numbers from files as floats. */}}
{{- define "regraft.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if or (kindIs "map" .) (kindIs "slice" .) -}}{{ toJson . }}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* The Secret with the passwords of the bundled servers. */}}
{{- define "regraft.bundledSecret" -}}
{{- .Values.bundled.existingSecret | default (printf "%s-bundled" (include "regraft.name" .)) -}}
{{- end -}}

{{- define "regraft.databaseSecret" -}}
{{- if .Values.bundled.postgresql.enabled -}}
{name: {{ include "regraft.bundledSecret" . }}, key: database-url}
{{- else -}}
{name: {{ .Values.database.existingSecret | quote }}, key: {{ .Values.database.secretKey | quote }}}
{{- end -}}
{{- end -}}

{{- define "regraft.brokerSecret" -}}
{{- if .Values.bundled.valkey.enabled -}}
{name: {{ include "regraft.bundledSecret" . }}, key: broker-url}
{{- else -}}
{name: {{ .Values.broker.existingSecret | quote }}, key: {{ .Values.broker.secretKey | quote }}}
{{- end -}}
{{- end -}}

{{- define "regraft.databaseEnv" -}}
- name: REGRAFT_DATA_DIR
  value: /data
- name: REGRAFT_DATABASE_URL
  valueFrom:
    secretKeyRef: {{ include "regraft.databaseSecret" . }}
{{- end -}}

{{- define "regraft.inferenceSecret" -}}
{{- if .Values.inference.existingSecret -}}
{name: {{ .Values.inference.existingSecret | quote }}, key: {{ .Values.inference.secretKey | quote }}}
{{- else -}}
{name: {{ include "regraft.bundledSecret" . }}, key: inference-key}
{{- end -}}
{{- end -}}

{{- define "regraft.samplersSecret" -}}
{name: {{ .Values.samplers.existingSecret | quote }}, key: {{ .Values.samplers.secretKey | quote }}}
{{- end -}}

{{/* The entry beside a key with the one before it, which servers accept, too, while it is there. Takes the key's reference. */}}
{{- define "regraft.previousKey" -}}
{{- $key := fromYaml . -}}
{{- dict "name" $key.name "key" (printf "%s-previous" $key.key) "optional" true | toJson -}}
{{- end -}}

{{/* The addresses of the rollout fleets, by base model. */}}
{{- define "regraft.samplers" -}}
{{- $fleets := dict -}}
{{- range .Values.samplers.fleets -}}
{{- $_ := set $fleets .model (list (printf "http://%s-sampler-%s:8300" (include "regraft.name" $) .name)) -}}
{{- end -}}
{{- toJson $fleets -}}
{{- end -}}

{{/* Where the rollout fleets are, for their clients. Begins with a new line. */}}
{{- define "regraft.samplersEnv" -}}
{{- if .Values.samplers.fleets }}
- name: REGRAFT_SAMPLERS
  value: {{ include "regraft.samplers" . | quote }}
- name: REGRAFT_SAMPLERS_KEY
  valueFrom:
    secretKeyRef: {{ include "regraft.samplersSecret" . }}
{{- end }}
{{- end -}}

{{/* The names under which the console is served. A name with a wildcard stands for names that only api.consoleHosts can list. */}}
{{- define "regraft.consoleHosts" -}}
{{- $hosts := .Values.api.consoleHosts -}}
{{- if .Values.ingress.enabled -}}
{{- $hosts = concat $hosts .Values.ingress.hosts -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
{{- $hosts = concat $hosts .Values.gateway.hostnames -}}
{{- end -}}
{{- $named := list -}}
{{- range $hosts | uniq -}}
{{- if not (contains "*" .) -}}
{{- $named = append $named . -}}
{{- end -}}
{{- end -}}
{{- toJson $named -}}
{{- end -}}

{{/*
The replicas of a Deployment that an autoscaler scales: as many as it has, also below a new minimum, because Helm 4 reports a
conflict where it would change the autoscaler's number. Its minimum on a new installation, and if it has none, which autoscalers
of Kubernetes leave so. Without replicas Kubernetes would set 1. Nothing without a cluster (helm template, GitOps): each sync would undo the autoscaler's number.
Takes (dict "live" Deployment "account" ServiceAccount "least" 2); both are empty if they do not exist, and each namespace of a
cluster has the account.
*/}}
{{- define "regraft.scaledReplicas" -}}
{{- if .live -}}
replicas: {{ int .live.spec.replicas | default (int .least) }}
{{- else if .account -}}
replicas: {{ int .least }}
{{- end -}}
{{- end -}}

{{/* The replicas of a Deployment. Takes (dict "root" $ "name" "…" "replicas" 2 "autoscaling" dict); without autoscaling that is empty. */}}
{{- define "regraft.replicas" -}}
{{- if .autoscaling -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace .name -}}
{{- $account := lookup "v1" "ServiceAccount" .root.Release.Namespace "default" -}}
{{- include "regraft.scaledReplicas" (dict "live" $live "account" $account "least" .autoscaling.minReplicas) -}}
{{- else -}}
replicas: {{ int .replicas }}
{{- end -}}
{{- end -}}

{{/*
How a Deployment of engines is replaced. Without a spare GPU (surge) a new pod cannot be scheduled until an old one has
released its own.
*/}}
{{- define "regraft.strategy" -}}
{{- $surge := dig "surge" (ternary 0 1 (gt (int .gpus) 0)) . | int -}}
type: RollingUpdate
rollingUpdate: {maxSurge: {{ $surge }}, maxUnavailable: {{ ternary 0 1 (gt $surge 0) }}}
{{- end -}}

{{/* The port of a Service by which KEDA finds the pods. Takes (dict "root" $ "autoscaling" dict). */}}
{{- define "regraft.scaledPort" -}}
{{- if .autoscaling -}}
- {name: metrics, port: {{ .root.Values.metrics.port }}, targetPort: metrics}
{{- end -}}
{{- end -}}

{{/*
The scaler of a Deployment of vLLM's engines; nothing without autoscaling. Begins with a new line.
Takes (dict "root" $ "component" "…" "autoscaling" dict "fleetOf" "model"); `fleetOf` is empty for inference.
*/}}
{{- define "regraft.scaledObject" -}}
{{- with .autoscaling }}
{{- $root := $.root }}
{{- $name := printf "%s-%s" (include "regraft.name" $root) $.component }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels: {{- include "regraft.labels" (dict "root" $root "component" $.component) | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ $name }}}
  pollingInterval: {{ $root.Values.keda.pollingInterval }}
  minReplicaCount: {{ .minReplicas }}
  maxReplicaCount: {{ .maxReplicas }}
  # From one replica to none, if nothing waits or runs.
  cooldownPeriod: 600
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        # A pod takes minutes to load its model, so none is ended for a short lull.
        scaleDown:
          stabilizationWindowSeconds: 600
          policies: [{type: Pods, value: 1, periodSeconds: 300}]
  # The sum of all pods, divided by the target, is the number of pods; the largest of these numbers counts.
  triggers:
    {{- $pods := dict "aggregateFromKubeServiceEndpoints" "true" "aggregationType" "sum" }}
    {{- include "regraft.trigger" (dict "root" $root "service" $name "value" "vllm:num_requests_waiting" "target" (.waitingRequests | default 16) "more" $pods) | nindent 4 }}
    {{- include "regraft.trigger" (dict "root" $root "service" $name "value" "vllm:kv_cache_usage_perc" "target" (divf (.cachePercent | default 70) 100) "more" $pods) | nindent 4 }}
    {{- with $.fleetOf }}
    {{- include "regraft.trigger" (dict "root" $root "value" (printf "regraft_fleet_jobs{model=%q}" .) "target" ($.autoscaling.jobs | default 4)) | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{/*
A trigger of KEDA that reads one metric, of the API without `service`.
Takes (dict "root" $ "service" "…" "value" "metric{label=\"…\"}" "target" 1 "more" dict).
*/}}
{{- define "regraft.trigger" -}}
{{- $service := .service | default (printf "%s-api-metrics" (include "regraft.name" .root)) -}}
- type: metrics-api
  metadata:
    # Without `.svc` KEDA would take the port for a part of the namespace.
    url: http://{{ $service }}.{{ .root.Release.Namespace }}.svc:{{ .root.Values.metrics.port }}/metrics
    format: prometheus
    valueLocation: {{ .value | squote }}
    targetValue: {{ include "regraft.text" .target | quote }}
    {{- with .more }}
    {{- range $name, $value := . }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
    {{- end }}
{{- end -}}

{{/* What runs a pool: a Job for each job, or a Deployment. */}}
{{- define "regraft.mode" -}}
{{- .mode | default (ternary "job" "warm" (gt (int .gpus) 0)) -}}
{{- end -}}

{{/* Not empty: there are pools of Jobs or fleets that scale, for which KEDA reads the metrics of the API. */}}
{{- define "regraft.kedaReadsApi" -}}
{{- if not .Values.dispatcher.enabled -}}
{{- range .Values.workers -}}
{{- if eq (include "regraft.mode" .) "job" -}}yes{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.samplers.fleets -}}
{{- if .autoscaling -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/*
The Deployments of inference: that of all models, and one for each entry of inference.models. Each has what the templates
read: component, model (empty: all), tensorParallel, and the fields of the values.
*/}}
{{- define "regraft.inferences" -}}
{{- $all := list -}}
{{- with .Values.inference -}}
{{- if .enabled -}}
{{- $all = append $all (merge (dict "component" "inference" "model" "" "cache" dict "autoscaling" dict) (omit . "models")) -}}
{{- end -}}
{{- range .models -}}
{{- $own := dict "component" (printf "inference-%s" .name) "tensorParallel" (include "regraft.degree" (dict "root" $ "entry" .)) "replicas" (dig "replicas" 1 .) -}}
{{- $all = append $all (merge $own . (dict "gpuResource" "nvidia.com/gpu" "kvCacheGiB" "auto" "adapterCache" "20Gi")) -}}
{{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* The components of the rollout fleets, as JSON. */}}
{{- define "regraft.samplerComponents" -}}
{{- $names := list -}}
{{- range .Values.samplers.fleets -}}
{{- $names = append $names (printf "sampler-%s" .name) -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* Those of inference. */}}
{{- define "regraft.inferenceComponents" -}}
{{- $names := list -}}
{{- range include "regraft.inferences" . | fromJsonArray -}}
{{- $names = append $names .component -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* Those of both that KEDA scales. */}}
{{- define "regraft.scaled" -}}
{{- $names := list -}}
{{- range .Values.samplers.fleets -}}
{{- if .autoscaling -}}{{- $names = append $names (printf "sampler-%s" .name) -}}{{- end -}}
{{- end -}}
{{- range .Values.inference.models -}}
{{- if .autoscaling -}}{{- $names = append $names (printf "inference-%s" .name) -}}{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* The GPUs that share each layer of the model of an entry of inference.models. Takes (dict "root" $ "entry" .). */}}
{{- define "regraft.degree" -}}
{{- .entry.tensorParallel | default (get (get .root.Values.models .entry.model | default dict) "tensorParallel") | default 1 | int -}}
{{- end -}}

{{/* The inference servers by base model, as JSON; `*` stands for all other models, and is missing if none serves those. */}}
{{- define "regraft.inferenceServers" -}}
{{- $servers := dict -}}
{{- with .Values.inference -}}
{{- if kindIs "map" .url -}}
{{- $servers = deepCopy .url -}}
{{- else if .url -}}
{{- $servers = dict "*" .url -}}
{{- end -}}
{{- end -}}
{{- range include "regraft.inferences" . | fromJsonArray -}}
{{- $_ := set $servers (.model | default "*") (printf "http://%s-%s:8100/v1" (include "regraft.name" $) .component) -}}
{{- end -}}
{{- toJson $servers -}}
{{- end -}}

{{/* Takes (dict "root" $ "pool" .). */}}
{{- define "regraft.jobsPerWorker" -}}
{{- int ((include "regraft.poolSettings" . | fromJson).jobs_per_worker | default 1) -}}
{{- end -}}

{{/* The root with a pool's own settings before those of all. Takes (dict "root" $ "pool" .). */}}
{{- define "regraft.poolSettings" -}}
{{- toJson (mergeOverwrite (deepCopy .root.Values.settings) (deepCopy (.pool.settings | default dict))) -}}
{{- end -}}

{{/* Nothing: there is none, and the API keeps a random key to itself. */}}
{{- define "regraft.firstKeySecret" -}}
{{- if .Values.firstKey.existingSecret -}}
{name: {{ .Values.firstKey.existingSecret | quote }}, key: {{ .Values.firstKey.secretKey | quote }}}
{{- else if or .Values.bundled.postgresql.enabled .Values.bundled.valkey.enabled .Values.bundled.seaweedfs.enabled -}}
{name: {{ include "regraft.bundledSecret" . }}, key: first-key}
{{- end -}}
{{- end -}}

{{/* The environment of the API and of a pool. Takes (dict "root" $ "component" "api" "gpuClass" "cpu" "isJob" false). */}}
{{- define "regraft.env" -}}
{{- $v := .root.Values -}}
{{ include "regraft.databaseEnv" .root }}
{{- if not .isJob }}
- name: REGRAFT_BROKER_URL
  valueFrom:
    secretKeyRef: {{ include "regraft.brokerSecret" .root }}
{{- end }}
- name: REGRAFT_GPU_CLASS
  value: {{ .gpuClass | quote }}
- name: REGRAFT_HARDWARE_FILE
  value: /etc/regraft/hardware.toml
- name: REGRAFT_GRADERS_FILE
  value: /etc/regraft/graders.toml
{{- with include "regraft.inferenceServers" .root | fromJson }}
- name: REGRAFT_INFERENCE_URL
  value: {{ eq (keys . | join " ") "*" | ternary (get . "*") (toJson .) | quote }}
{{- end }}
{{- include "regraft.samplersEnv" .root }}
{{ include "regraft.commonEnv" (dict "Values" $v "Release" .root.Release "Chart" .root.Chart "Files" .root.Files "component" .component) }}
{{- end -}}

{{/* What the pools say of their GPUs, by gpuClass, and their price, as core/hardware.py reads it. */}}
{{- define "regraft.hardware" -}}
{{- $classes := dict -}}
{{- range .Values.workers -}}
{{- $_ := set $classes .gpuClass (include "regraft.gpuClass" . | fromJson) -}}
{{- end -}}
{{- $hardware := dict "gpu_classes" $classes -}}
{{- with .Values.price.perGpuSecond -}}
{{- $_ := set $hardware "price_per_gpu_second" . -}}
{{- end -}}
{{- with .Values.price.currency -}}
{{- $_ := set $hardware "currency" . -}}
{{- end -}}
{{- toToml $hardware -}}
{{- end -}}

{{/* The most nodes that a job of a pool has. */}}
{{- define "regraft.maxNodes" -}}
{{- max (int (.nodes | default 1)) (int (.maxNodes | default 1)) -}}
{{- end -}}

{{/* What jobs of a pool may choose, as core/hardware.py reads it; empty: nothing. */}}
{{- define "regraft.sizes" -}}
{{- if or (hasKey . "maxGpus") (hasKey . "maxNodes") -}}
{{- dict "gpus" (int .gpus) "nodes" (int (.nodes | default 1)) "max_gpus" (int (.maxGpus | default .gpus)) "max_nodes" (include "regraft.maxNodes" . | int) | toJson -}}
{{- end -}}
{{- end -}}

{{/* Of one pool. */}}
{{- define "regraft.gpuClass" -}}
{{- $class := dict -}}
{{- if eq (int .gpus) 0 -}}
{{- $_ := set $class "gpu_memory_gib" 0 -}}
{{- else -}}
{{- $_ := set $class "ranks" (sub (int .gpus) (int .samplingGpus)) -}}
{{- end -}}
{{- if eq (include "regraft.mode" .) "job" -}}
{{- $_ := set $class "in_kubernetes_jobs" true -}}
{{- end -}}
{{- with include "regraft.sizes" . -}}
{{- $_ := set $class "sizes" (fromJson .) -}}
{{- end -}}
{{- $pool := . -}}
{{- range $from, $to := dict "gpuMemoryGiB" "gpu_memory_gib" "kvCacheGiB" "kv_cache_gib" "trainTokenBudget" "train_token_budget" "sampler" "sampler" -}}
{{- if hasKey $pool $from -}}
{{- $_ := set $class $to (index $pool $from) -}}
{{- end -}}
{{- end -}}
{{- toJson $class -}}
{{- end -}}

{{- define "regraft.metricsPort" -}}
{{- if .Values.metrics.enabled -}}
- {name: metrics, containerPort: {{ .Values.metrics.port }}}
{{- end -}}
{{- end -}}

{{/* What inference has, too: the store, the models, the settings. Takes (dict "Values" … "Release" … "Files" … "component" "api"). */}}
{{- define "regraft.commonEnv" -}}
{{- $v := .Values -}}
{{- if $v.metrics.enabled -}}
- name: REGRAFT_METRICS_PORT
  value: {{ $v.metrics.port | quote }}
{{ end -}}
{{- $keys := $v.objectStore.existingSecret -}}
{{- if $v.bundled.seaweedfs.enabled -}}
{{- $keys = include "regraft.bundledSecret" . -}}
- name: REGRAFT_BLOB_URL
  value: s3://regraft/all
- name: REGRAFT_S3_ENDPOINT_URL
  value: http://{{ include "regraft.name" . }}-seaweedfs:8333
- name: REGRAFT_S3_REGION
  value: us-east-1
{{- else -}}
- name: REGRAFT_BLOB_URL
  value: {{ printf "s3://%s/%s" $v.objectStore.bucket $v.objectStore.prefix | trimSuffix "/" | quote }}
{{- with $v.objectStore.endpointUrl }}
- name: REGRAFT_S3_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with $v.objectStore.region }}
- name: REGRAFT_S3_REGION
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- if $keys }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef: {name: {{ $keys | quote }}, key: {{ . }}}
{{- end }}
{{- end }}
{{- if $v.models }}
- name: REGRAFT_MODELS_FILE
  value: /etc/regraft/models.toml
{{- end }}
{{- if or $v.inference.enabled $v.inference.models $v.inference.existingSecret }}
- name: REGRAFT_INFERENCE_KEY
  valueFrom:
    secretKeyRef: {{ include "regraft.inferenceSecret" . }}
{{- end }}
{{- include "regraft.settingsEnv" . }}
{{- end -}}

{{/* The settings that the component reads (files/settings.json), and extraEnv. */}}
{{- define "regraft.settingsEnv" -}}
{{- $read := index (.Files.Get "files/settings.json" | fromJson) .component -}}
{{- range $name, $value := .Values.settings }}
{{- if has $name $read }}
- name: REGRAFT_{{ upper $name }}
  value: {{ include "regraft.text" $value | quote }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.extraEnv }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* `envFrom`, `volumeMounts` and `volumes` that the API and every pool have. */}}
{{- define "regraft.envFrom" -}}
{{- with .Values.graders.existingSecret }}
envFrom:
  - secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "regraft.mounts" -}}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/regraft, readOnly: true}
{{- include "regraft.extraMounts" . }}
{{- end -}}

{{- define "regraft.volumes" -}}
- name: data
  emptyDir: {sizeLimit: 1Gi}
- name: config
  configMap: {name: {{ include "regraft.name" . }}}
{{- include "regraft.extraVolumes" . }}
{{- end -}}

{{/* What the operator adds to all pods of the service. Each begins with the end of the line before it. */}}
{{- define "regraft.extraMounts" -}}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "regraft.extraVolumes" -}}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What loads models has besides. */}}
{{- define "regraft.hubToken" -}}
{{- with .Values.weights.hubSecret -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . | quote }}, key: HF_TOKEN}
{{- end -}}
{{- end -}}

{{- define "regraft.modelMounts" -}}
- {name: cache, mountPath: /data/models, subPath: converted}
- {name: cache, mountPath: /cache/huggingface, subPath: huggingface}
- {name: cache, mountPath: /cache/compiled, subPath: compiled}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.weights.existingClaim }}
- {name: weights, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/*
The init container of pods that use the database, which waits until that has their schema. Without a hook of Helm, nothing
else makes the migration come first. With it the pods must not wait: `helm install --wait` runs the migration of the bundled
PostgreSQL once they are ready. Takes (dict "root" $ "image" "api").
*/}}
{{- define "regraft.waitForSchema" -}}
{{- if ne .root.Values.migrate.hooks "helm" -}}
{{- include "regraft.migrateContainer" (dict "root" .root "image" .image "name" "wait-for-schema" "args" (list "--wait" "1800")) -}}
{{- end -}}
{{- end -}}

{{/* A container that runs regraft-server migrate. Takes (dict "root" $ "image" "api" "name" "migrate" "args" list). */}}
{{- define "regraft.migrateContainer" -}}
- name: {{ .name }}
  image: {{ include "regraft.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: {{ concat (list "regraft-server" "migrate") .args | toJson }}
  env:
    {{- include "regraft.databaseEnv" .root | nindent 4 }}
    {{- range $name, $value := .root.Values.extraEnv }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
  resources: {{- toYaml .root.Values.migrate.resources | nindent 4 }}
  securityContext: {{- include "regraft.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: data, mountPath: /data}
    - {name: tmp, mountPath: /tmp}
    {{- include "regraft.extraMounts" .root | indent 4 }}
{{- end -}}

{{/* Seconds of a rollout for that init container, which Kubernetes counts as those of the start. */}}
{{- define "regraft.schemaSeconds" -}}
{{- ternary 0 1800 (eq .Values.migrate.hooks "helm") -}}
{{- end -}}

{{/*
The init container that checks the GPUs of a pod, in seconds: a pod of a pool of Jobs starts for each job. A failure shows
in its log with the remedy, and the pod does not start. Takes (dict "root" $ "pool" . "component" "worker").
*/}}
{{- define "regraft.doctor" -}}
{{- if and .root.Values.doctor.enabled (gt (int .pool.gpus) 0) -}}
- name: doctor
  image: {{ include "regraft.image" (dict "root" .root "image" "worker-gpu") | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [regraft-server, doctor, --only, gpu, memory, shared memory]
  env:
    - {name: HOME, value: /tmp}
    - {name: USER, value: regraft}
    - {name: REGRAFT_COMPILE_CACHE, value: /cache/compiled}
    - {name: REGRAFT_DATA_DIR, value: /data}
    {{- include "regraft.settingsEnv" (dict "Values" .root.Values "Files" .root.Files "component" .component) | nindent 4 }}
  resources:
    {{- $resources := deepCopy .pool.resources }}
    {{- $_ := set $resources.limits (.pool.gpuResource | default "nvidia.com/gpu") (int .pool.gpus) }}
    {{- toYaml $resources | nindent 4 }}
  securityContext: {{- include "regraft.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    {{- include "regraft.mounts" .root | nindent 4 }}
    {{- include "regraft.modelMounts" .root | nindent 4 }}
{{- end -}}
{{- end -}}

{{/* Takes (dict "root" $ "cache" dict); an empty one stands for that of all pods. */}}
{{- define "regraft.modelVolumes" -}}
{{- $cache := .cache | default .root.Values.cache -}}
- name: cache
  {{- if $cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $cache.existingClaim | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $cache.size | default .root.Values.cache.size }}}
  {{- end }}
{{- with .root.Values.weights.existingClaim }}
- name: weights
  persistentVolumeClaim: {claimName: {{ . | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "regraft.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Before SIGTERM, because the Service still routes requests here for a moment after the pod starts to terminate. */}}
{{- define "regraft.preStop" -}}
preStop:
  {{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
  sleep: {seconds: 5}
  {{- else }}
  exec:
    command: [sleep, "5"]
  {{- end }}
{{- end -}}

{{/* What a server needs to end: the sleep before SIGTERM, its requests in flight, then a margin. */}}
{{- define "regraft.requestsGrace" -}}
{{- $seconds := 600 -}}
{{- if hasKey .Values.settings "drain_requests_seconds" -}}
{{- $seconds = int .Values.settings.drain_requests_seconds -}}
{{- end -}}
{{- add 15 $seconds -}}
{{- end -}}

{{/* A worker needs this long to end: its drain, then a margin for what is around it. Takes its settings. */}}
{{- define "regraft.grace" -}}
{{- add 30 (ceil (.drain_seconds | default 30)) -}}
{{- end -}}

{{/* A quantity of Kubernetes in GB, as a number. */}}
{{- define "regraft.gigabytes" -}}
{{- $number := regexFind "^[0-9.]+" (toString .) -}}
{{- $factors := dict "Ki" 1.024e-6 "Mi" 1.048576e-3 "Gi" 1.073741824 "Ti" 1099.511627776 "k" 1e-6 "M" 1e-3 "G" 1.0 "T" 1e3 "Pi" 1125899.906842624 "Ei" 1152921504.606846976 "P" 1e6 "E" 1e9 "" 1e-9 "m" 1e-12 -}}
{{- mulf (float64 $number) (get $factors (trimPrefix $number (toString .))) -}}
{{- end -}}

{{/* Four fifths of a volume's size in bytes: the rest is for the blocks of its files. */}}
{{- define "regraft.cacheBytes" -}}
{{- include "regraft.gigabytes" . | float64 | mulf 8e8 | floor | int64 -}}
{{- end -}}

{{/*
The weights of a model of a hub in GB, by the billions in its name, such as 14B or 8x7B, and by what it says of their
bytes: two a parameter unless it is quantized. 0: the name has no billions. Experts share the rest of their layers, which
is a fifth of the product.
*/}}
{{- define "regraft.weightsOf" -}}
{{- $said := regexFind "([0-9]+[xX])?[0-9]+([.][0-9]+)?[bB]([^a-zA-Z0-9]|$)" . -}}
{{- $experts := regexFind "^[0-9]+[xX]" $said -}}
{{- $billions := trimPrefix $experts $said | regexFind "^[0-9.]+" | default "0" | float64 -}}
{{- if $experts -}}
{{- $billions = mulf 0.8 $billions (trimSuffix "x" (lower $experts) | float64) -}}
{{- end -}}
{{- $bytes := 2.0 -}}
{{- if regexMatch "(?i)bf16" . -}}
{{- else if regexMatch "(?i)fp8" . -}}
{{- $bytes = 1.0 -}}
{{- else if regexMatch "(?i)gpt-oss|mxfp4" . -}}
{{- $bytes = 0.55 -}}
{{- end -}}
{{- mulf $bytes $billions -}}
{{- end -}}

{{/* Not empty: the path is in a mount of extraVolumeMounts or of a podTemplate, of all pods, of a pool or of inference. Takes (dict "root" $ "path" "…"). */}}
{{- define "regraft.isMounted" -}}
{{- $path := .path -}}
{{- $v := .root.Values -}}
{{- $mounts := $v.extraVolumeMounts -}}
{{- range concat (list $v $v.inference) $v.workers $v.inference.models $v.samplers.fleets -}}
{{- range dig "spec" "containers" list (.podTemplate | default dict) -}}
{{- $mounts = concat $mounts (.volumeMounts | default list) -}}
{{- end -}}
{{- end -}}
{{- range $mounts -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $path) -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* Everything that the schema cannot see, because it spans values. All of it at once, so that one run tells it all. */}}
{{- define "regraft.check" -}}
{{- $wrong := list -}}
{{- $v := .Values -}}
{{- if not (or $v.database.existingSecret $v.bundled.postgresql.enabled) -}}
{{- $wrong = append $wrong "database.existingSecret: name the Secret with the URL of your PostgreSQL, or set bundled.postgresql.enabled for a demo" -}}
{{- end -}}
{{- if not (or $v.broker.existingSecret $v.bundled.valkey.enabled) -}}
{{- $wrong = append $wrong "broker.existingSecret: name the Secret with the URL of your Redis, or set bundled.valkey.enabled for a demo" -}}
{{- end -}}
{{- if not (or $v.objectStore.bucket $v.bundled.seaweedfs.enabled) -}}
{{- $wrong = append $wrong "objectStore.bucket: name your bucket, or set bundled.seaweedfs.enabled for a demo" -}}
{{- end -}}
{{- if and (ne $v.migrate.hooks "helm") (not $v.bundled.existingSecret) -}}
{{- range $name := list "postgresql" "valkey" "seaweedfs" -}}
{{- if (index $v.bundled $name).enabled -}}
{{- $wrong = append $wrong (printf "bundled.existingSecret: name the Secret with the passwords of bundled.%s, because only Helm's own installation keeps those that the chart draws" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $v.networkPolicy.enabled -}}
{{- $bundled := dict "database" $v.bundled.postgresql.enabled "broker" $v.bundled.valkey.enabled "objectStore" $v.bundled.seaweedfs.enabled -}}
{{- $hasStore := false -}}
{{- if $v.networkPolicy.cilium.enabled -}}
{{- range include "regraft.storeHosts" . | fromJsonArray -}}
{{- if (include "regraft.target" . | fromJson).isOutside -}}
{{- $hasStore = true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name := list "database" "broker" "objectStore" -}}
{{- if not (or (index $bundled $name) (index $v.networkPolicy $name).to (and $hasStore (eq $name "objectStore"))) -}}
{{- $wrong = append $wrong (printf "networkPolicy.%s.to: list its peers, such as [{ipBlock: {cidr: …}}], or set networkPolicy.enabled to false" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.networkPolicy.cilium.enabled (not $v.networkPolicy.enabled) -}}
{{- $wrong = append $wrong "networkPolicy.cilium.enabled: adds names to the policies of networkPolicy.enabled; set that, too" -}}
{{- end -}}
{{- with $v.networkPolicy.cilium -}}
{{- $listed := dict "networkPolicy.cilium.apiNames" .apiNames "networkPolicy.cilium.workerNames" .workerNames "networkPolicy.cilium.inferenceNames" .inferenceNames -}}
{{- if .enabled -}}
{{- $_ := set $listed "graders.endpointHosts" $v.graders.endpointHosts -}}
{{- end -}}
{{- range $where, $names := $listed -}}
{{- if and $names (not $v.networkPolicy.cilium.enabled) -}}
{{- $wrong = append $wrong (printf "%s: are names for Cilium's policies; set networkPolicy.cilium.enabled, or remove them" $where) -}}
{{- else -}}
{{- range $names -}}
{{- $target := include "regraft.target" . | fromJson -}}
{{- if not (or $target.isOutside (and (eq $where "graders.endpointHosts") $target.isInside)) -}}
{{- $wrong = append $wrong (printf "%s: %s is not a name outside the cluster for Cilium: letters, digits, `-`, `_` and `*` between dots, and a port up to 65535; list Services and addresses in the egress rules of networkPolicy" $where .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name := list "api" "worker" "inference" "samplers" "dispatcher" -}}
{{- with (index $v $name).serviceAccount -}}
{{- if and .annotations (ne (include "regraft.createsAccount" .) "true") -}}
{{- $wrong = append $wrong (printf "%s.serviceAccount.annotations: are for the account that the chart creates; annotate your own, %s, and remove them" $name (.name | default "default")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $accounts := dict -}}
{{- range $component := include "regraft.accountOwners" . | fromJsonArray -}}
{{- $name := include "regraft.account" (dict "root" $ "component" $component) -}}
{{- $_ := set $accounts $name (append (get $accounts $name | default list) $component) -}}
{{- end -}}
{{- range $name, $owners := $accounts -}}
{{- $creators := list -}}
{{- range $owners -}}
{{- if eq (include "regraft.createsAccount" (index $v (ternary "samplers" . (eq . "sampler"))).serviceAccount) "true" -}}
{{- $creators = append $creators . -}}
{{- end -}}
{{- end -}}
{{- if gt (len $creators) 1 -}}
{{- $wrong = append $wrong (printf "serviceAccount.create: %s would each create the account %s; set create to false for all but one of them, or give them different names" (join " and " $creators) $name) -}}
{{- end -}}
{{- if and (has "dispatcher" $owners) (gt (len $owners) 1) (ne $name "default") -}}
{{- $wrong = append $wrong (printf "dispatcher.serviceAccount.name: the pods of %s have the account %s, too, and would have the rights of the dispatcher; give it an account of its own" (without $owners "dispatcher" | join " and ") $name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.dispatcher.enabled $v.networkPolicy.enabled (not $v.networkPolicy.kubernetesApi.to) (not $v.networkPolicy.cilium.enabled) -}}
{{- $wrong = append $wrong "networkPolicy.kubernetesApi.to: list the addresses of the Kubernetes API for the dispatcher, as `kubectl get endpointslices -n default` shows them, or set networkPolicy.enabled to false" -}}
{{- end -}}
{{- if and $v.dispatcher.enabled (eq (include "regraft.account" (dict "root" $ "component" "dispatcher")) "default") -}}
{{- $wrong = append $wrong "dispatcher.serviceAccount.name: name an account other than `default`, which other pods of the namespace have, and which would have the rights of the dispatcher" -}}
{{- end -}}
{{- $names := list -}}
{{- $classes := list -}}
{{- $perClass := dict -}}
{{- $jobPools := dict -}}
{{- $permanent := false -}}
{{- range $pool := $v.workers -}}
{{- if has .name $names -}}
{{- $wrong = append $wrong (printf "workers: two pools are named %s" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $classes = append $classes .gpuClass -}}
{{- $said := include "regraft.gpuClass" . -}}
{{- if ne (get $perClass .gpuClass | default $said) $said -}}
{{- $wrong = append $wrong (printf "workers: the pool %s and another of the gpuClass %s differ in mode, gpus, samplingGpus, maxGpus, maxNodes, gpuMemoryGiB, kvCacheGiB, trainTokenBudget or sampler; pools of the same gpuClass must be equal, so give one of them another gpuClass" .name .gpuClass) -}}
{{- end -}}
{{- $_ := set $perClass .gpuClass $said -}}
{{- if and (hasKey . "gpuMemoryGiB") (eq (int .gpus) 0) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has gpuMemoryGiB and no gpus" .name) -}}
{{- end -}}
{{- if and (hasKey . "samplingGpus") (ge (int .samplingGpus) (int .gpus)) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has %d samplingGpus, which must be below its gpus, %d: the others learn" .name (int .samplingGpus) (int .gpus)) -}}
{{- end -}}
{{- if and (hasKey . "samplingGpus") (gt (int .nodes) 1) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has samplingGpus and several nodes, and only those of the first node sample: %d GPUs of each other node would be idle; remove samplingGpus, or use one node" .name (int .samplingGpus)) -}}
{{- end -}}
{{- if and .kueueTopology (not .kueueQueue) (not $v.dispatcher.enabled) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has a kueueTopology and no kueueQueue" .name) -}}
{{- end -}}
{{- $mode := include "regraft.mode" . -}}
{{- if include "regraft.sizes" . -}}
{{- if not (and $v.dispatcher.enabled (eq $mode "job") (gt (int .gpus) 0)) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has maxGpus or maxNodes, up to which jobs choose theirs; only a pool of Jobs with gpus and with dispatcher.enabled starts pods of different sizes" .name) -}}
{{- end -}}
{{- if or (lt (int (.maxGpus | default .gpus)) (int .gpus)) (lt (int (.maxNodes | default .nodes | default 1)) (int (.nodes | default 1))) -}}
{{- $wrong = append $wrong (printf "workers: maxGpus and maxNodes of the pool %s must not be below its gpus and nodes, which jobs have that do not choose" .name) -}}
{{- end -}}
{{- if and (gt (int .maxGpus) 1) (contains "/mig-" (.gpuResource | default "")) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has maxGpus and the gpuResource %s, and a process uses one slice of a GPU only; use whole GPUs, or remove maxGpus" .name .gpuResource) -}}
{{- end -}}
{{- $chosen := include "regraft.poolSettings" (dict "root" $ "pool" .) | fromJson -}}
{{- if and (hasKey $chosen "engines") (ne (toString $chosen.engines) "auto") -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has a number of engines, and jobs choose their GPUs; set engines to auto for the pool" .name) -}}
{{- end -}}
{{- end -}}
{{- if eq $mode "job" -}}
{{- with get $jobPools .gpuClass -}}
{{- $wrong = append $wrong (printf "workers: the pools %s and %s both start Jobs for the gpuClass %s, and each would start one for every job; make them one pool with a larger maxReplicas, or give one of them another gpuClass" . $pool.name $pool.gpuClass) -}}
{{- end -}}
{{- $_ := set $jobPools .gpuClass .name -}}
{{- if hasKey . "replicas" -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has replicas and is a pool of Jobs; set maxReplicas instead, or mode: warm" .name) -}}
{{- else if not (hasKey . "maxReplicas") -}}
{{- $wrong = append $wrong (printf "workers: the pool %s is a pool of Jobs; set maxReplicas to the number of jobs that it may run at once, or mode: warm" .name) -}}
{{- end -}}
{{- if $v.dispatcher.enabled -}}
{{- if gt (include "regraft.jobsPerWorker" (dict "root" $ "pool" .) | int) 1 -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has jobs_per_worker, and the dispatcher starts a pod for each job; set it to 1 for the pool" .name) -}}
{{- end -}}
{{- else if hasKey . "trainingRuntime" -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has a trainingRuntime, for which only the dispatcher creates TrainJobs; set dispatcher.enabled" .name) -}}
{{- end -}}
{{- if and (hasKey . "trainingRuntime") $v.graders.existingSecret -}}
{{- $wrong = append $wrong (printf "graders.existingSecret: a TrainJob cannot name a Secret for all variables; set it in the runtime of the pool %s, and the value only without such pools" .name) -}}
{{- end -}}
{{- if not (or $v.metrics.enabled $v.dispatcher.enabled) -}}
{{- $wrong = append $wrong (printf "metrics.enabled: set it, because KEDA reads the length of the queue of the pool %s from the metrics of the API" .name) -}}
{{- end -}}
{{- if and (gt (include "regraft.maxNodes" . | int) 1) (not (hasKey . "trainingRuntime")) (semverCompare "<1.33-0" $.Capabilities.KubeVersion.Version) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has nodes, which need Kubernetes 1.33 (success policies of Jobs)" .name) -}}
{{- end -}}
{{- else -}}
{{- if hasKey . "maxReplicas" -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has maxReplicas and is a Deployment; set replicas instead, or mode: job" .name) -}}
{{- end -}}
{{- if hasKey . "trainingRuntime" -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has a trainingRuntime and is a Deployment; set mode: job" .name) -}}
{{- end -}}
{{- if gt (int .nodes) 1 -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has nodes, which only pools of Jobs may have; set mode: job" .name) -}}
{{- end -}}
{{- if gt (int (dig "replicas" 1 .)) 0 -}}{{- $permanent = true -}}{{- end -}}
{{- end -}}
{{- if and (gt (include "regraft.maxNodes" . | int) 1) (gt (len (printf "%s-worker-%s" (include "regraft.name" $) .name)) 48) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has nodes, and the names of its pods would be too long; shorten its name or the release's name" .name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.dispatcher.enabled (not $jobPools) -}}
{{- $wrong = append $wrong "dispatcher.enabled: no pool has the mode job, so there is nothing to start" -}}
{{- end -}}
{{- if not $permanent -}}
{{- $wrong = append $wrong "workers: no pool has a worker that stays, and without one no files are validated, no webhooks are sent and the jobs of lost workers are not requeued; add a pool with mode: warm and at least one replica (it may have gpus: 0 and a gpuClass that no model uses)" -}}
{{- end -}}
{{- range $name, $model := $v.models -}}
{{- if and $model.gpuClass (not (has $model.gpuClass $classes)) -}}
{{- $wrong = append $wrong (printf "models: %s needs the gpuClass %s, which no pool of workers serves" $name $model.gpuClass) -}}
{{- end -}}
{{- end -}}
{{- $sampled := list -}}
{{- range $v.samplers.fleets -}}
{{- $sampled = append $sampled .model -}}
{{- end -}}
{{- $servers := include "regraft.inferenceServers" . | fromJson -}}
{{- range $name, $model := $v.models -}}
{{- $degree := int ($model.tensorParallel | default 1) -}}
{{- if and (gt $degree 1) $servers (not (hasKey $servers $name)) (or $v.inference.enabled (not (hasKey $servers "*"))) (not (and $v.inference.enabled (has $name $sampled))) -}}
{{- $wrong = append $wrong (printf "inference.models: %s has tensorParallel %d and nothing that serves it, because a pod of inference.enabled has one GPU; add an entry for it, or a fleet of samplers beside inference.enabled" $name $degree) -}}
{{- end -}}
{{- $class := $model.gpuClass | default (first $v.workers).gpuClass -}}
{{- range $v.workers -}}
{{- if and (eq .gpuClass $class) (gt (int .gpus) 0) (not (has $name $sampled)) -}}
{{- $settings := include "regraft.poolSettings" (dict "root" $ "pool" .) | fromJson -}}
{{- $there := int (.samplingGpus | default .gpus) -}}
{{- $engines := 1 -}}
{{- if and (hasKey $settings "engines") (ne (toString $settings.engines) "auto") -}}
{{- $engines = int $settings.engines -}}
{{- end -}}
{{- if gt $degree $there -}}
{{- $wrong = append $wrong (printf "models: an engine of %s uses its tensorParallel, %d, and the pool %s has %d GPUs that sample" $name $degree .name $there) -}}
{{- else if gt (mul $degree $engines) (int .gpus) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has %d gpus, and %d engines of %s use %d" .name (int .gpus) $engines $name (mul $degree $engines)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $model := $v.models -}}
{{- if ne 1 (len (without (list $model.path $model.package $model.hub) nil "")) -}}
{{- $wrong = append $wrong (printf "models: %s needs exactly one of path, package (with file) and hub" $name) -}}
{{- end -}}
{{- end -}}
{{- $caches := list -}}
{{- range $v.workers -}}
{{- $caches = append $caches (dict "pod" .name "gpuClass" .gpuClass "cache" .cache "keeps" (eq (include "regraft.mode" .) "warm")) -}}
{{- end -}}
{{- if $v.inference.enabled -}}
{{- $caches = append $caches (dict "pod" "inference" "gpuClass" "" "keeps" true) -}}
{{- end -}}
{{- range $caches -}}
{{- $cache := .cache | default $v.cache -}}
{{- if not $cache.existingClaim -}}
{{- $pod := . -}}
{{- $size := $cache.size | default $v.cache.size -}}
{{- $room := include "regraft.gigabytes" $size | float64 -}}
{{- $where := ternary (printf "workers: the cache of %s" .pod) "cache.size" (not (empty .cache)) -}}
{{- $together := 0.0 -}}
{{- range $name, $model := $v.models -}}
{{- $here := ternary (eq $pod.gpuClass ($model.gpuClass | default (first $v.workers).gpuClass)) (not (hasKey (omit $servers "*") $name)) (ne $pod.gpuClass "") -}}
{{- if and $model.hub $here -}}
{{- $needed := include "regraft.weightsOf" $model.hub | float64 -}}
{{- if gt $needed $room -}}
{{- $wrong = append $wrong (printf "%s: %s has about %.0f GB of weights by its name, and %s are %.0f GB, so that Kubernetes would evict each pod that downloads it; raise it, or set an existingClaim" $where $model.hub $needed $size $room) -}}
{{- else if $pod.keeps -}}
{{- $together = addf $together $needed -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt $together $room -}}
{{- $wrong = append $wrong (printf "%s: a pod of %s downloads models with about %.0f GB of weights, one after the other, and %s are %.0f GB; raise it, or set an existingClaim" $where $pod.pod $together $size $room) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $model := $v.models -}}
{{- if and (hasPrefix "/models/" ($model.path | default "")) (not $v.weights.existingClaim) (not (include "regraft.isMounted" (dict "root" $ "path" $model.path))) -}}
{{- $wrong = append $wrong (printf "weights.existingClaim: name the claim with the weights of %s, %s; weights in an image of yours need another path" $name $model.path) -}}
{{- end -}}
{{- end -}}
{{- range $alias, $model := $v.modelAliases -}}
{{- if hasKey $v.models $alias -}}
{{- $wrong = append $wrong (printf "modelAliases: %s is the name of a model, which it would hide" $alias) -}}
{{- else if not (or (hasKey $v.models $model) (hasKey $v.modelAliases $model)) -}}
{{- $wrong = append $wrong (printf "modelAliases: %s refers to %s, which is not in models" $alias $model) -}}
{{- else -}}
{{- $target := $model -}}
{{- range $v.modelAliases -}}
{{- $target = get $v.modelAliases $target | default $target -}}
{{- end -}}
{{- if not (hasKey $v.models $target) -}}
{{- $wrong = append $wrong (printf "modelAliases: %s refers to itself through %s" $alias $model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $judge := $v.graders.judges -}}
{{- if ne 1 (len (without (list $judge.model $judge.baseUrl) nil "")) -}}
{{- $wrong = append $wrong (printf "graders.judges: %s needs either baseUrl or model" $name) -}}
{{- end -}}
{{- if and $judge.model (not $servers) -}}
{{- $wrong = append $wrong (printf "graders.judges: %s is a model of the registry; set inference.enabled, add an entry to inference.models, or set inference.url to a server that serves the registry's models" $name) -}}
{{- else if and $judge.model (not (hasKey $servers $judge.model)) (not (hasKey $servers "*")) -}}
{{- $wrong = append $wrong (printf "graders.judges: %s is the model %s, for which inference.url and inference.models have no server" $name $judge.model) -}}
{{- end -}}
{{- end -}}
{{- if kindIs "map" $v.inference.url -}}
{{- range $model, $_ := $v.inference.url -}}
{{- if not (or (eq $model "*") (hasKey $v.models $model)) -}}
{{- $wrong = append $wrong (printf "inference.url: %s is not in models" $model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.inference.enabled $v.inference.url -}}
{{- $wrong = append $wrong "inference.url: names a server other than the chart's; set either it or inference.enabled" -}}
{{- end -}}
{{- if and $v.inference.url (not $v.inference.existingSecret) -}}
{{- $wrong = append $wrong "inference.existingSecret: name the Secret with the key of the server in inference.url" -}}
{{- end -}}
{{- if and (or $v.inference.enabled $v.inference.models) (not (or $v.inference.existingSecret $v.bundled.postgresql.enabled $v.bundled.valkey.enabled $v.bundled.seaweedfs.enabled)) -}}
{{- $wrong = append $wrong "inference.existingSecret: name the Secret with a key of your choice, which API and workers send to the inference server" -}}
{{- end -}}
{{- $serverNames := list -}}
{{- $served := list -}}
{{- range $v.inference.models -}}
{{- if has .name $serverNames -}}
{{- $wrong = append $wrong (printf "inference.models: two entries are named %s" .name) -}}
{{- end -}}
{{- $serverNames = append $serverNames .name -}}
{{- if has .model $served -}}
{{- $wrong = append $wrong (printf "inference.models: two entries serve %s; raise the replicas of one" .model) -}}
{{- end -}}
{{- $served = append $served .model -}}
{{- if and (kindIs "map" $v.inference.url) (hasKey ($v.inference.url | default dict) .model) -}}
{{- $wrong = append $wrong (printf "inference.url: has an address for %s, which the entry %s of inference.models serves; remove one of them" .model .name) -}}
{{- end -}}
{{- $degree := include "regraft.degree" (dict "root" $ "entry" .) | int -}}
{{- if not (hasKey $v.models .model) -}}
{{- $wrong = append $wrong (printf "inference.models: %s is not in models" .model) -}}
{{- else if ne $degree (max 1 (int .gpus)) -}}
{{- $wrong = append $wrong (printf "inference.models: %s has %d gpus, and an engine of %s uses its tensorParallel, %d" .name (int .gpus) .model $degree) -}}
{{- end -}}
{{- $sampler := $v.inference.sampler | default $v.settings.sampler | default "registry" -}}
{{- if eq $sampler "registry" -}}
{{- $sampler = (get $v.models .model | default dict).sampler | default "vllm" -}}
{{- end -}}
{{- if and .autoscaling (or (eq (int .gpus) 0) (ne $sampler "vllm")) -}}
{{- $wrong = append $wrong (printf "inference.models: %s has autoscaling, which reads metrics of vLLM, and its pods run transformers; give it gpus and the sampler vllm, or set replicas" .name) -}}
{{- end -}}
{{- end -}}
{{- range $where, $entries := dict "inference.models" $v.inference.models "samplers.fleets" $v.samplers.fleets -}}
{{- range $entries -}}
{{- with .autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- $wrong = append $wrong (printf "%s: minReplicas of the autoscaling is above maxReplicas" $where) -}}
{{- end -}}
{{- if not $v.metrics.enabled -}}
{{- $wrong = append $wrong (printf "metrics.enabled: set it, because the autoscaling in %s reads the metrics of the pods" $where) -}}
{{- end -}}
{{- end -}}
{{- $cache := .cache | default dict -}}
{{- $hub := (get $v.models .model | default dict).hub -}}
{{- if and $hub $cache.size (not $cache.existingClaim) -}}
{{- if gt (include "regraft.weightsOf" $hub | float64) (include "regraft.gigabytes" $cache.size | float64) -}}
{{- $wrong = append $wrong (printf "%s: the cache of %s, %s, has no room for the weights of %s; raise its size, or set its existingClaim" $where .name $cache.size $hub) -}}
{{- end -}}
{{- end -}}
{{- if and .autoscaling (hasKey . "replicas") -}}
{{- $wrong = append $wrong (printf "%s: %s has replicas and autoscaling; remove one of them" $where .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $fleetNames := list -}}
{{- $fleetModels := list -}}
{{- range $v.samplers.fleets -}}
{{- if has .name $fleetNames -}}
{{- $wrong = append $wrong (printf "samplers.fleets: two fleets are named %s" .name) -}}
{{- end -}}
{{- $fleetNames = append $fleetNames .name -}}
{{- if has .model $fleetModels -}}
{{- $wrong = append $wrong (printf "samplers.fleets: two fleets sample %s; raise the replicas of one" .model) -}}
{{- end -}}
{{- $fleetModels = append $fleetModels .model -}}
{{- if not (hasKey $v.models .model) -}}
{{- $wrong = append $wrong (printf "samplers.fleets: %s is not in models" .model) -}}
{{- else if ne (int ((index $v.models .model).tensorParallel | default 1)) (int .gpus) -}}
{{- $wrong = append $wrong (printf "samplers.fleets: %s has %d gpus, and a sampler of %s uses its tensorParallel, %d" .name (int .gpus) .model (int ((index $v.models .model).tensorParallel | default 1))) -}}
{{- end -}}
{{- if and .autoscaling (eq (int (.autoscaling | default dict).minReplicas) 0) $v.inference.enabled (not (hasKey $servers .model)) -}}
{{- $wrong = append $wrong (printf "samplers.fleets: %s answers requests of users for inference.enabled and has minReplicas 0, and no request starts a pod; set minReplicas to 1, or add an entry for %s to inference.models" .name .model) -}}
{{- end -}}
{{- end -}}
{{- if and $v.samplers.fleets (not $v.samplers.existingSecret) -}}
{{- $wrong = append $wrong "samplers.existingSecret: name the Secret with a key of your choice, which workers send to the samplers" -}}
{{- end -}}
{{- range $name, $_ := $v.extraEnv -}}
{{- if and (hasPrefix "REGRAFT_" $name) (ne $name "REGRAFT_PYTHON_GRADERS") -}}
{{- $wrong = append $wrong (printf "extraEnv: %s must be set in settings, or by the chart's value for it" $name) -}}
{{- else if eq $name "FORWARDED_ALLOW_IPS" -}}
{{- $wrong = append $wrong "extraEnv: FORWARDED_ALLOW_IPS must be set in api.trustedProxies" -}}
{{- else if has $name (list "HOME" "USER" "HF_HOME") -}}
{{- $wrong = append $wrong (printf "extraEnv: %s is a folder or user of the chart's pods; set cache.existingClaim for another cache" $name) -}}
{{- else if eq $name "HF_TOKEN" -}}
{{- $wrong = append $wrong "extraEnv: HF_TOKEN belongs into a Secret, named by weights.hubSecret" -}}
{{- else if has $name (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN") -}}
{{- $wrong = append $wrong (printf "extraEnv: %s belongs into a Secret, named by objectStore.existingSecret" $name) -}}
{{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $v.extraVolumes -}}
{{- if has .name (concat $volumes (list "data" "tmp" "config" "cache" "shm" "weights" "templates")) -}}
{{- $wrong = append $wrong (printf "extraVolumes: the name %s is taken; give it another" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := list -}}
{{- range $v.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- $wrong = append $wrong (printf "extraVolumeMounts: %s is not a name in extraVolumes" .name) -}}
{{- end -}}
{{- if has (trimSuffix "/" .mountPath) (concat $paths (list "/data" "/data/models" "/tmp" "/etc/regraft" "/etc/regraft/dispatcher" "/cache/huggingface" "/cache/compiled" "/dev/shm" "/models")) -}}
{{- $wrong = append $wrong (printf "extraVolumeMounts: %s is already a mount path; choose another mountPath" .mountPath) -}}
{{- end -}}
{{- $paths = append $paths (trimSuffix "/" .mountPath) -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) -}}
{{- $wrong = append $wrong "ingress.hosts: name the hosts of the Ingress" -}}
{{- end -}}
{{- if not $v.metrics.enabled -}}
{{- range $name := list "monitors" "rules" "dashboard" -}}
{{- if (index $v.metrics $name).enabled -}}
{{- $wrong = append $wrong (printf "metrics.%s.enabled: requires metrics.enabled" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with get (dict "8000" "the API's" "8100" "inference's" "8300" "a sampler's" "29400" "a group's" "29401" "a group's") (toString (int $v.metrics.port)) -}}
{{- $wrong = append $wrong (printf "metrics.port: is %s port" .) -}}
{{- end -}}
{{- if and $v.settings.sso_header $v.networkPolicy.enabled (not $v.networkPolicy.apiFrom) -}}
{{- $wrong = append $wrong "networkPolicy.apiFrom: with settings.sso_header, name the proxy, so that nobody else can connect to the API" -}}
{{- end -}}
{{- range $name, $instead := dict "imageRegistry" "image.registry" "imagePullSecrets" "image.pullSecrets" "storageClass" "bundled.*.storageClass" "defaultStorageClass" "bundled.*.storageClass" -}}
{{- if hasKey ($v.global | default dict) $name -}}
{{- $wrong = append $wrong (printf "global.%s: the chart uses no global values; set %s" $name $instead) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- $wrong = append $wrong "gateway.parentRefs: name the Gateway of the route" -}}
{{- end -}}
{{- if gt (int $v.api.autoscaling.minReplicas) (int $v.api.autoscaling.maxReplicas) -}}
{{- $wrong = append $wrong "api.autoscaling.minReplicas: is above maxReplicas" -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n\n  %s\n" (join "\n  " (uniq $wrong))) -}}
{{- end -}}
{{- end -}}
