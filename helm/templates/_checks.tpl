{{/* Relations between values that a schema cannot put into one clear sentence. */}}
{{- define "tidegate.checks" -}}
{{- $store := .Values.store -}}
{{- if and (not $store.enabled) (not $store.external.url) (not $store.external.existingSecret) -}}
{{- fail "store.enabled is false, so store.external.url or store.external.existingSecret must say where the store is." -}}
{{- end -}}
{{- if and $store.enabled (or $store.external.url $store.external.existingSecret) -}}
{{- fail "store.external is set while store.enabled is true; set store.enabled=false to use the external store." -}}
{{- end -}}
{{- if and .Values.controller.llm.baseUrl (not .Values.controller.llm.model) -}}
{{- fail "controller.llm.baseUrl is set, so controller.llm.model must name the model to ask for there." -}}
{{- end -}}
{{- if and .Values.controller.ingress.enabled (not .Values.controller.ingress.hosts) -}}
{{- fail "controller.ingress.enabled is true, so controller.ingress.hosts must list at least one host name." -}}
{{- end -}}
{{- if .Values.agents.enabled -}}
{{- if not .Values.agents.caFingerprint -}}
{{- fail "agents.enabled is true, so agents.caFingerprint must be the fingerprint that `tidegate token create` printed." -}}
{{- end -}}
{{- if not .Values.agents.joinToken.existingSecret -}}
{{- fail "agents.enabled is true, so agents.joinToken.existingSecret must name a Secret that holds a join token." -}}
{{- end -}}
{{- end -}}
{{- end -}}
