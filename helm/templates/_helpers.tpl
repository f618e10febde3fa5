{{/* Names */}}
{{- define "tidegate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 40 characters leave room for the suffixes of components, and for the 63 that a label may have. */}}
{{- define "tidegate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "tidegate.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels; called with (dict "root" $ "component" NAME) */}}
{{- define "tidegate.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tidegate.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: tidegate
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without the chart's version, so that a new chart alone replaces no pod. */}}
{{- define "tidegate.podLabels" -}}
{{ include "tidegate.selectorLabels" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image reference; called with (dict "root" $ "image" IMAGE) */}}
{{- define "tidegate.image" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.imageRegistry -}}
{{- $repository = printf "%s/%s" . $repository -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The ServiceAccount of a component; called with (dict "root" $ "component" NAME) */}}
{{- define "tidegate.serviceAccountName" -}}
{{- $accounts := .root.Values.serviceAccounts -}}
{{- $made := ternary (printf "%s-%s" (include "tidegate.fullname" .root) .component) "default" $accounts.create -}}
{{- default $made (get $accounts .component) -}}
{{- end -}}

{{/* What a container may do: nothing that it was not given. */}}
{{- define "tidegate.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "tidegate.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Where and with which images a pod may run; called with (dict "root" $ "values" VALUES) */}}
{{- define "tidegate.scheduling" -}}
# A Service named tidegate would otherwise put TIDEGATE_PORT and its like into the environment.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .values }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
The value of a generated secret: what was given, else what the cluster holds (so that upgrades keep it), else 40 random letters
and digits (about 238 bits). Called with (dict "root" $ "name" SECRET "key" KEY "given" VALUE); base64.
*/}}
{{- define "tidegate.secretValue" -}}
{{- $held := (lookup "v1" "Secret" .root.Release.Namespace .name).data | default dict -}}
{{- if .given -}}
{{- .given | b64enc -}}
{{- else if hasKey $held .key -}}
{{- get $held .key -}}
{{- else -}}
{{- randAlphaNum 40 | b64enc -}}
{{- end -}}
{{- end -}}

{{- define "tidegate.adminSecretName" -}}
{{- default (printf "%s-admin" (include "tidegate.fullname" .)) .Values.controller.auth.existingSecret -}}
{{- end -}}

{{- define "tidegate.storeSecretName" -}}
{{- default (printf "%s-store" (include "tidegate.fullname" .)) .Values.store.auth.existingSecret -}}
{{- end -}}

{{/* The Secret that holds the URL of an external store, unless it was given. */}}
{{- define "tidegate.externalStoreSecretName" -}}
{{- default (printf "%s-external-store" (include "tidegate.fullname" .)) .Values.store.external.existingSecret -}}
{{- end -}}

{{- define "tidegate.externalStoreSecretKey" -}}
{{- ternary .Values.store.external.secretKey "url" (not (empty .Values.store.external.existingSecret)) -}}
{{- end -}}

{{- define "tidegate.controllerClaimName" -}}
{{- default (printf "%s-controller" (include "tidegate.fullname" .)) .Values.controller.persistence.existingClaim -}}
{{- end -}}

{{/* The door Service; agents of this release dial it. */}}
{{- define "tidegate.doorName" -}}
{{- printf "%s-door.%s.svc" (include "tidegate.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* The name that the controller tells to those who ask where its door is. */}}
{{- define "tidegate.advertise" -}}
{{- default (include "tidegate.doorName" .) .Values.controller.advertise -}}
{{- end -}}

{{/*
Lays `own` over `base`, in place, maps key by key. Unlike Sprig's merge it lets false, 0 and "" win: a pool that says
`privileged: false` must not inherit true.
*/}}
{{- define "tidegate.overlay" -}}
{{- $base := .base -}}
{{- range $key, $value := .own -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $base $key)) -}}
{{- include "tidegate.overlay" (dict "base" (get $base $key) "own" $value) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
