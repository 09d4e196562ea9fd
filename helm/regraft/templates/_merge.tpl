{{/* A pod template with `podTemplate` of all components and of this one merged into it. Takes (dict "root" $ "text" "…" "patch" dict). */}}
{{- define "regraft.pod" -}}
{{- $pod := fromYaml .text -}}
{{- if hasKey $pod "Error" -}}
{{- fail $pod.Error -}}
{{- end -}}
{{- range list .root.Values.podTemplate .patch -}}
{{- with . -}}
{{- $pod = include "regraft.merge" (dict "to" $pod "with" .) | fromJson -}}
{{- end -}}
{{- end -}}
{{- range concat $pod.spec.containers ($pod.spec.initContainers | default list) -}}
{{- if not .image -}}
{{- fail (printf "\n\n  podTemplate: the container %s has no image, and no container of the chart's pod has that name (%s)\n" .name (first $pod.spec.containers).name) -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.diskRequests -}}
{{- $disk := 0.0 -}}
{{- range $pod.spec.volumes -}}
{{- if and .emptyDir (ne (.emptyDir.medium | default "") "Memory") -}}
{{- $disk = addf $disk (include "regraft.gigabytes" .emptyDir.sizeLimit | float64) -}}
{{- end -}}
{{- end -}}
{{- $container := first $pod.spec.containers -}}
{{- $limit := get ($container.resources.limits | default dict) "ephemeral-storage" -}}
{{- /* A request above the limit would be refused; without one Kubernetes requests the limit. */ -}}
{{- $fits := or (not $limit) (ge (include "regraft.gigabytes" $limit | float64) $disk) -}}
{{- if and $fits (not (hasKey $container.resources.requests "ephemeral-storage")) -}}
{{- $_ := set $container.resources.requests "ephemeral-storage" (printf "%dM" (mulf 1000.0 $disk | ceil | int)) -}}
{{- end -}}
{{- end -}}
{{- range $pod.spec.initContainers -}}
{{- if eq .name "doctor" -}}
{{- $_ := set . "resources" (deepCopy (first $pod.spec.containers).resources) -}}
{{- end -}}
{{- end -}}
{{- with $pod.spec.initContainers -}}
{{- $_ := set $pod.spec "initContainers" (include "regraft.inOrder" . | fromJsonArray) -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{/*
Init containers with `wait-for-schema` behind the last sidecar (restartPolicy: Always): the database may be reached through
it, such as through cloud-sql-proxy. The others keep their order. Takes a list, prints JSON.
*/}}
{{- define "regraft.inOrder" -}}
{{- $waits := list -}}
{{- $until := list -}}
{{- $behind := list -}}
{{- range . -}}
{{- if eq .name "wait-for-schema" -}}
{{- $waits = list . -}}
{{- else if eq (.restartPolicy | default "") "Always" -}}
{{- $until = append (concat $until $behind) . -}}
{{- $behind = list -}}
{{- else -}}
{{- $behind = append $behind . -}}
{{- end -}}
{{- end -}}
{{- concat $until $waits $behind | toJson -}}
{{- end -}}

{{/* Merge a map into another as Kubernetes' strategic merge patch: null removes a key; lists whose items have a name, volumeMounts
and ports are merged by item, other lists are replaced. A volume with another source replaces the one of its name. Prints JSON. Takes (dict "to" map "with" map). */}}
{{- define "regraft.merge" -}}
{{- $result := deepCopy .to -}}
{{- range $key, $value := .with -}}
{{- if kindIs "invalid" $value -}}
{{- $result = omit $result $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (index $result $key)) -}}
{{- $_ := set $result $key (include "regraft.merge" (dict "to" (index $result $key) "with" $value) | fromJson) -}}
{{- else if and (kindIs "slice" $value) (kindIs "slice" (index $result $key)) (has $key (list "containers" "initContainers" "volumes" "env" "volumeMounts" "ports")) -}}
{{- $_ := set $result $key (include "regraft.mergeItems" (dict "to" (index $result $key) "with" $value "volumes" (eq $key "volumes") "by" (get (dict "volumeMounts" "mountPath" "ports" "containerPort") $key | default "name")) | fromJsonArray) -}}
{{- else -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/* Takes (dict "to" list "with" list "by" "name"). */}}
{{- define "regraft.mergeItems" -}}
{{- $by := .by -}}
{{- $with := .with -}}
{{- $volumes := .volumes -}}
{{- $result := list -}}
{{- $seen := list -}}
{{- range $item := .to -}}
{{- $merged := $item -}}
{{- range $with -}}
{{- if eq (toString (index . $by)) (toString (index $item $by)) -}}
{{- $added := . -}}
{{- range $key, $_ := $item -}}
{{- $added = omit $added $key -}}
{{- end -}}
{{- if and $volumes $added -}}
{{- $merged = include "regraft.merge" (dict "to" dict "with" .) | fromJson -}}
{{- else -}}
{{- $merged = include "regraft.merge" (dict "to" $item "with" .) | fromJson -}}
{{- end -}}
{{- $seen = append $seen (toString (index . $by)) -}}
{{- end -}}
{{- end -}}
{{- $result = append $result $merged -}}
{{- end -}}
{{- range $with -}}
{{- if not (has (toString (index . $by)) $seen) -}}
{{- $result = append $result . -}}
{{- end -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}
