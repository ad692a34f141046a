# SGLang's own image with this plugin:  docker build -t sglang-kvq .
# For a reproducible build add --build-arg SGLANG_DIGEST=@sha256:… of the tag.
ARG SGLANG_TAG=v0.5.23
ARG SGLANG_DIGEST=
FROM lmsysorg/sglang:${SGLANG_TAG}${SGLANG_DIGEST}

COPY pyproject.toml README.md LICENSE /opt/sglang-kvq/
COPY sglang_kvq /opt/sglang-kvq/sglang_kvq
# The image's torch, triton and SGLang stay as they are: they are not among the requirements.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /opt/sglang-kvq \
 && python3 -c "from importlib.metadata import entry_points as e; assert 'kvq' in e(group='sglang.srt.plugins').names"
COPY --chmod=755 launch/serve.sh /usr/local/bin/serve.sh

# A number, so that Kubernetes can see that it is not root. The home folder holds the model and kernel caches.
RUN useradd --uid 10001 --create-home kvq
USER 10001
ENV HOME=/home/kvq PORT=30000
WORKDIR /home/kvq
RUN mkdir -p .cache/huggingface
VOLUME /home/kvq/.cache

EXPOSE 30000
# Large models take minutes to load.
HEALTHCHECK --interval=30s --timeout=25s --start-period=20m --retries=3 \
  CMD curl --fail --silent "http://127.0.0.1:${PORT}/health" || exit 1
ENTRYPOINT ["/usr/local/bin/serve.sh"]
CMD ["--model-path", "Qwen/Qwen3-8B"]
