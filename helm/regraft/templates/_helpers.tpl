{{- define "regraft.name" -}}
{{- if contains "regraft" .Release.Name -}}{{ .Release.Name | trunc 34 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-regraft" (.Release.Name | trunc 26 | trimSuffix "-") }}
{{- end -}}
{{- end -}}

{{/* Takes (dict "root" $ "component" "api"). */}}
{{- define "regraft.selector" -}}
app.kubernetes.io/name: regraft
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "regraft.labels" -}}
{{ include "regraft.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Takes (dict "root" $ "image" "worker-gpu"). */}}
{{- define "regraft.image" -}}
{{- with .root.Values.image }}{{ .repository }}/{{ $.image }}:{{ .tag | default $.root.Chart.AppVersion }}{{ end -}}
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

{{- define "regraft.databaseSecret" -}}
{{- if .Values.bundled.postgresql.enabled -}}
{name: {{ include "regraft.name" . }}-bundled, key: database-url}
{{- else -}}
{name: {{ .Values.database.existingSecret | quote }}, key: {{ .Values.database.secretKey | quote }}}
{{- end -}}
{{- end -}}

{{- define "regraft.brokerSecret" -}}
{{- if .Values.bundled.valkey.enabled -}}
{name: {{ include "regraft.name" . }}-bundled, key: broker-url}
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
{name: {{ include "regraft.name" . }}-bundled, key: inference-key}
{{- end -}}
{{- end -}}

{{- define "regraft.samplersSecret" -}}
{name: {{ .Values.samplers.existingSecret | quote }}, key: {{ .Values.samplers.secretKey | quote }}}
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

{{/* Nothing: there is none, and the API keeps a random key to itself. */}}
{{- define "regraft.firstKeySecret" -}}
{{- if .Values.firstKey.existingSecret -}}
{name: {{ .Values.firstKey.existingSecret | quote }}, key: {{ .Values.firstKey.secretKey | quote }}}
{{- else if or .Values.bundled.postgresql.enabled .Values.bundled.valkey.enabled .Values.bundled.seaweedfs.enabled -}}
{name: {{ include "regraft.name" . }}-bundled, key: first-key}
{{- end -}}
{{- end -}}

{{/* The environment of the API and of a pool. Takes (dict "root" $ "gpuClass" "cpu"). */}}
{{- define "regraft.env" -}}
{{- $v := .root.Values -}}
{{ include "regraft.databaseEnv" .root }}
- name: REGRAFT_BROKER_URL
  valueFrom:
    secretKeyRef: {{ include "regraft.brokerSecret" .root }}
- name: REGRAFT_GPU_CLASS
  value: {{ .gpuClass | quote }}
- name: REGRAFT_GPU_CLASSES
  value: {{ include "regraft.gpuClasses" .root | quote }}
{{- if or $v.graders.judges $v.graders.endpointHosts }}
- name: REGRAFT_GRADERS_FILE
  value: /etc/regraft/graders.toml
{{- end }}
{{- if or $v.inference.enabled $v.inference.url }}
- name: REGRAFT_INFERENCE_URL
  {{- $address := $v.inference.url | default (printf "http://%s-inference:8100/v1" (include "regraft.name" .root)) }}
  value: {{ kindIs "map" $address | ternary (toJson $address) $address | quote }}
{{- end }}
{{- include "regraft.samplersEnv" .root }}
{{ include "regraft.commonEnv" .root }}
{{- end -}}

{{/* What the pools say of their GPUs, by gpuClass, as core/settings.py takes it. */}}
{{- define "regraft.gpuClasses" -}}
{{- $classes := dict -}}
{{- range .Values.workers -}}
{{- $_ := set $classes .gpuClass (include "regraft.gpuClass" . | fromJson) -}}
{{- end -}}
{{- toJson $classes -}}
{{- end -}}

{{/* Of one pool. */}}
{{- define "regraft.gpuClass" -}}
{{- $class := dict -}}
{{- if eq (int .gpus) 0 -}}
{{- $_ := set $class "gpu_memory_gib" 0 -}}
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

{{/* What inference has, too: the store, the models, the settings. */}}
{{- define "regraft.commonEnv" -}}
{{- $v := .Values -}}
{{- if $v.metrics.enabled -}}
- name: REGRAFT_METRICS_PORT
  value: {{ $v.metrics.port | quote }}
{{ end -}}
{{- $keys := $v.objectStore.existingSecret -}}
{{- if $v.bundled.seaweedfs.enabled -}}
{{- $keys = printf "%s-bundled" (include "regraft.name" .) -}}
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
{{- if or $v.inference.enabled $v.inference.existingSecret }}
- name: REGRAFT_INFERENCE_KEY
  valueFrom:
    secretKeyRef: {{ include "regraft.inferenceSecret" . }}
{{- end }}
{{- include "regraft.settingsEnv" . }}
{{- end -}}

{{/* What members of groups have, too: the settings. */}}
{{- define "regraft.settingsEnv" -}}
{{- range $name, $value := .Values.settings }}
- name: REGRAFT_{{ upper $name }}
  value: {{ include "regraft.text" $value | quote }}
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
- {name: shm, mountPath: /dev/shm}
{{- if .Values.weights.existingClaim }}
- {name: weights, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "regraft.modelVolumes" -}}
- name: cache
  {{- if .Values.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
  {{- end }}
{{- with .Values.weights.existingClaim }}
- name: weights
  persistentVolumeClaim: {claimName: {{ . | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Pods start anew when the files they read at their start have changed. */}}
{{- define "regraft.podAnnotations" -}}
checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
{{- end -}}

{{- define "regraft.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* One worker needs this long to end: its drain, then a margin for what is around it. */}}
{{- define "regraft.grace" -}}
{{- add 30 (ceil (.Values.settings.drain_seconds | default 30)) -}}
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
{{- if $v.networkPolicy.enabled -}}
{{- $bundled := dict "database" $v.bundled.postgresql.enabled "broker" $v.bundled.valkey.enabled "objectStore" $v.bundled.seaweedfs.enabled -}}
{{- range $name := list "database" "broker" "objectStore" -}}
{{- if not (or (index $bundled $name) (index $v.networkPolicy $name).to) -}}
{{- $wrong = append $wrong (printf "networkPolicy.%s.to: list its peers, such as [{ipBlock: {cidr: …}}], or set networkPolicy.enabled to false" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- $classes := list -}}
{{- $perClass := dict -}}
{{- $permanent := false -}}
{{- range $v.workers -}}
{{- if has .name $names -}}
{{- $wrong = append $wrong (printf "workers: two pools are named %s" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $classes = append $classes .gpuClass -}}
{{- $said := include "regraft.gpuClass" . -}}
{{- if ne (get $perClass .gpuClass | default $said) $said -}}
{{- $wrong = append $wrong (printf "workers: the pool %s and another of the gpuClass %s differ in gpus, gpuMemoryGiB, kvCacheGiB, trainTokenBudget or sampler; pools of the same gpuClass must be equal, so give one of them another gpuClass" .name .gpuClass) -}}
{{- end -}}
{{- $_ := set $perClass .gpuClass $said -}}
{{- if and (hasKey . "gpuMemoryGiB") (eq (int .gpus) 0) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has gpuMemoryGiB and no gpus" .name) -}}
{{- end -}}
{{- if hasKey . "autoscaling" -}}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has an autoscaling.minReplicas above its maxReplicas" .name) -}}
{{- end -}}
{{- if hasKey . "replicas" -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has both replicas and autoscaling; set only one" .name) -}}
{{- end -}}
{{- if gt (int .nodes) 1 -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has both nodes and autoscaling; the chart does not scale groups, so set replicas instead" .name) -}}
{{- end -}}
{{- if gt (int .autoscaling.minReplicas) 0 -}}{{- $permanent = true -}}{{- end -}}
{{- else if gt (int (dig "replicas" 1 .)) 0 -}}
{{- $permanent = true -}}
{{- end -}}
{{- if and (gt (int .nodes) 1) (gt (len (printf "%s-worker-%s" (include "regraft.name" $) .name)) 48) -}}
{{- $wrong = append $wrong (printf "workers: the pool %s has nodes, and the names of its pods would be too long; shorten its name or the release's name" .name) -}}
{{- end -}}
{{- end -}}
{{- if not $permanent -}}
{{- $wrong = append $wrong "workers: every pool can scale to zero, and without workers no files are validated, no webhooks are sent and the jobs of lost workers are not requeued; keep one pool with at least one replica (it may have gpus: 0 and a gpuClass that no model uses)" -}}
{{- end -}}
{{- range $name, $model := $v.models -}}
{{- if and $model.gpuClass (not (has $model.gpuClass $classes)) -}}
{{- $wrong = append $wrong (printf "models: %s needs the gpuClass %s, which no pool of workers serves" $name $model.gpuClass) -}}
{{- end -}}
{{- end -}}
{{- range $name, $model := $v.models -}}
{{- if ne 1 (len (without (list $model.path $model.package $model.hub) nil "")) -}}
{{- $wrong = append $wrong (printf "models: %s needs exactly one of path, package (with file) and hub" $name) -}}
{{- end -}}
{{- end -}}
{{- range $alias, $model := $v.modelAliases -}}
{{- if hasKey $v.models $alias -}}
{{- $wrong = append $wrong (printf "modelAliases: %s is the name of a model, which it would hide" $alias) -}}
{{- else if not (or (hasKey $v.models $model) (hasKey $v.modelAliases $model)) -}}
{{- $wrong = append $wrong (printf "modelAliases: %s refers to %s, which is not in models" $alias $model) -}}
{{- end -}}
{{- end -}}
{{- range $name, $judge := $v.graders.judges -}}
{{- if ne 1 (len (without (list $judge.model $judge.baseUrl) nil "")) -}}
{{- $wrong = append $wrong (printf "graders.judges: %s needs either baseUrl or model" $name) -}}
{{- end -}}
{{- if and $judge.model (not $v.inference.url) (not $v.inference.enabled) -}}
{{- $wrong = append $wrong (printf "graders.judges: %s is a model of the registry; set inference.enabled, or set inference.url to a server that serves the registry's models" $name) -}}
{{- end -}}
{{- end -}}
{{- if kindIs "map" $v.inference.url -}}
{{- range $model, $_ := $v.inference.url -}}
{{- if not (or (eq $model "*") (hasKey $v.models $model)) -}}
{{- $wrong = append $wrong (printf "inference.url: %s is not in models" $model) -}}
{{- end -}}
{{- end -}}
{{- range $name, $judge := $v.graders.judges -}}
{{- if and $judge.model (not (hasKey $v.inference.url $judge.model)) (not (hasKey $v.inference.url "*")) -}}
{{- $wrong = append $wrong (printf "graders.judges: %s is the model %s, for which inference.url has no address" $name $judge.model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.inference.enabled $v.inference.url -}}
{{- $wrong = append $wrong "inference.url: names a server other than the chart's; set either it or inference.enabled" -}}
{{- end -}}
{{- if and $v.inference.url (not $v.inference.existingSecret) -}}
{{- $wrong = append $wrong "inference.existingSecret: name the Secret with the key of the server in inference.url" -}}
{{- end -}}
{{- if and $v.inference.enabled (not (or $v.inference.existingSecret $v.bundled.postgresql.enabled $v.bundled.valkey.enabled $v.bundled.seaweedfs.enabled)) -}}
{{- $wrong = append $wrong "inference.existingSecret: name the Secret with a key of your choice, which API and workers send to the inference server" -}}
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
{{- end -}}
{{- if and $v.samplers.fleets (not $v.samplers.existingSecret) -}}
{{- $wrong = append $wrong "samplers.existingSecret: name the Secret with a key of your choice, which workers send to the samplers" -}}
{{- end -}}
{{- range $name, $_ := $v.extraEnv -}}
{{- if and (hasPrefix "REGRAFT_" $name) (ne $name "REGRAFT_PYTHON_GRADERS") -}}
{{- $wrong = append $wrong (printf "extraEnv: %s must be set in settings, or by the chart's value for it" $name) -}}
{{- else if has $name (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN") -}}
{{- $wrong = append $wrong (printf "extraEnv: %s belongs into a Secret, named by objectStore.existingSecret" $name) -}}
{{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $v.extraVolumes -}}
{{- if has .name (concat $volumes (list "data" "tmp" "config" "cache" "shm" "weights")) -}}
{{- $wrong = append $wrong (printf "extraVolumes: the name %s is taken; give it another" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := list -}}
{{- range $v.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- $wrong = append $wrong (printf "extraVolumeMounts: %s is not a name in extraVolumes" .name) -}}
{{- end -}}
{{- if has (trimSuffix "/" .mountPath) (concat $paths (list "/data" "/data/models" "/tmp" "/etc/regraft" "/cache/huggingface" "/dev/shm" "/models")) -}}
{{- $wrong = append $wrong (printf "extraVolumeMounts: %s is already a mount path; choose another mountPath" .mountPath) -}}
{{- end -}}
{{- $paths = append $paths (trimSuffix "/" .mountPath) -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- $wrong = append $wrong "ingress.host: name the host of the Ingress" -}}
{{- end -}}
{{- if not $v.metrics.enabled -}}
{{- range $name := list "monitors" "rules" "dashboard" -}}
{{- if (index $v.metrics $name).enabled -}}
{{- $wrong = append $wrong (printf "metrics.%s.enabled: requires metrics.enabled" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with get (dict "8000" "the API's" "8100" "inference's" "29400" "a group's") (toString (int $v.metrics.port)) -}}
{{- $wrong = append $wrong (printf "metrics.port: is %s port" .) -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- $wrong = append $wrong "gateway.parentRefs: name the Gateway of the route" -}}
{{- end -}}
{{- if gt (int $v.api.autoscaling.minReplicas) (int $v.api.autoscaling.maxReplicas) -}}
{{- $wrong = append $wrong "api.autoscaling.minReplicas: is above maxReplicas" -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n\n  %s\n" (join "\n  " $wrong)) -}}
{{- end -}}
{{- end -}}
