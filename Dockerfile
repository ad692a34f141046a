# SGLang's own image with this plugin:  docker build -t sglang-kvq .
# For a reproducible build:  --build-arg BASE=lmsysorg/sglang@sha256:…  with the digest of the tag.
ARG BASE=docker.io/lmsysorg/sglang:v0.5.23
FROM ${BASE}
ARG BASE
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="sglang-kvq" \
      org.opencontainers.image.description="SGLang with a 2-bit KV cache" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# SGLang ends a broken server by killing itself. The kernel ignores that of process 1, so an init has that number.
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /opt/sglang-kvq/
COPY sglang_kvq /opt/sglang-kvq/sglang_kvq
# The image's torch, triton and SGLang stay as they are: they are not among the requirements.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /opt/sglang-kvq \
 && python3 -c "from importlib.metadata import entry_points as e; assert 'kvq' in e(group='sglang.srt.plugins').names"
COPY --chmod=755 launch/serve.sh launch/health.sh /usr/local/bin/

# A number, so that Kubernetes can see that it is not root. Clusters that choose the user themselves give it group 0.
RUN useradd --uid 10001 --gid 0 --create-home kvq && chmod 2770 /home/kvq
USER 10001
# Python asks for the user's name, which a user without an entry in /etc/passwd has only here.
ENV HOME=/home/kvq USER=kvq LOGNAME=kvq PORT=30000
WORKDIR /home/kvq
# Weights and compiled kernels. All that a server writes is here, in /tmp and in /dev/shm.
VOLUME /home/kvq

EXPOSE 30000
# Large models take minutes to load.
HEALTHCHECK --interval=30s --timeout=25s --start-period=20m --retries=3 CMD ["health.sh"]
ENTRYPOINT ["tini", "--", "serve.sh"]
CMD ["--model-path", "Qwen/Qwen3-8B"]
