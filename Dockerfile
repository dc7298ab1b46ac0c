# Turnstile on a CPU, as a user without rights. Build and run:
#
#   docker build -t turnstile .
#   docker run --rm -p 127.0.0.1:8000:8000 -e TURNSTILE_API_KEY=secret -v turnstile:/models \
#     --stop-timeout 45 turnstile
#
# The container listens on all its addresses, so it needs a key. There is no torch in the image: the
# native kernels serve without it. Docker waits 10 s after SIGTERM, less than streams may take to end (--shutdown-timeout, 30 s): hence
# --stop-timeout (in Kubernetes terminationGracePeriodSeconds). With --read-only add --tmpfs /tmp.

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
RUN python -m venv /opt/turnstile
ENV PATH=/opt/turnstile/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY csrc csrc
RUN pip install ./csrc
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt .

FROM python:3.11-slim
RUN useradd --system --uid 10001 --create-home turnstile \
    && mkdir /models && chown turnstile /models
COPY --from=build /opt/turnstile /opt/turnstile
ENV PATH=/opt/turnstile/bin:$PATH \
    TURNSTILE_CACHE=/models \
    HF_HOME=/models/huggingface \
    TURNSTILE_SERVE_HOST=0.0.0.0 \
    TURNSTILE_SERVE_LOG_FORMAT=json
USER turnstile
VOLUME /models
EXPOSE 8000
# Alive, whatever it is doing: loading and draining are no reason to be killed. Another port belongs
# into TURNSTILE_SERVE_PORT, where this finds it, and not into a flag. Not urllib: it would ask the
# HTTP_PROXY that Docker may have put into the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-Ic", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('TURNSTILE_SERVE_PORT', 8000)), timeout=4); c.request('GET', '/livez'); exit(c.getresponse().status != 200)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["turnstile"]
CMD ["serve"]
