# Two images from one file, for x86_64 and aarch64:
#   docker build --target controller -t tidegate/controller:0.1.0 .
#   docker build --target agent -t tidegate/agent:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PATH=/opt/tidegate/bin:$PATH
# The same numbers as in the chart: volumes are handed over by number.
RUN groupadd --gid 10001 tidegate \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tidegate \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/tidegate /var/lib/tidegate-agent

FROM base AS build-agent
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tidegate
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY sla sla
COPY policies policies
COPY agents agents
COPY controller controller
COPY benchmarks benchmarks
RUN pip install --constraint constraints.txt '.[document]'

FROM build-agent AS build-controller
RUN pip install --constraint constraints.txt '.[controller]'

# What an edge device needs and nothing more: no Ray, no web framework, no dashboard.
FROM base AS agent
COPY --from=build-agent /opt/tidegate /opt/tidegate
USER 10001:10001
WORKDIR /var/lib/tidegate-agent
VOLUME /var/lib/tidegate-agent
ENV HOME=/tmp TIDEGATE_INGRESS_PORT=8081
EXPOSE 7444 8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"TIDEGATE_INGRESS_PORT\"]}/v2/health/live', timeout=4)"]
ENTRYPOINT ["tidegate"]
# Followed by: agent join tidegate://HOST:7443 --token-file FILE --ca-fingerprint HEX --platform NAME
#              --dir /var/lib/tidegate-agent --peer-port 7444 --ingress-port 8081
CMD ["agent", "join", "--help"]

FROM base AS controller
COPY --from=build-controller /opt/tidegate /opt/tidegate
USER 10001:10001
WORKDIR /var/lib/tidegate
VOLUME /var/lib/tidegate
ENV HOME=/tmp RAY_USAGE_STATS_ENABLED=0 TIDEGATE_CACHE=/var/lib/tidegate/cache
EXPOSE 8080 7443
# The certificate is Tidegate's own and is not what this check is about.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=6 CMD ["python", "-c", "import ssl, urllib.request; urllib.request.urlopen('https://127.0.0.1:8080/healthz', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["tidegate"]
# Without --store this starts the embedded store in the volume.
CMD ["controller", "--host", "0.0.0.0", "--port", "8080", "--agent-port", "7443", "--dir", "/var/lib/tidegate"]
