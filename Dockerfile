# syntax=docker/dockerfile:1
# CPU image by default:   docker build -t ropext .
# CUDA image:             docker build -t ropext --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cuNNN .
#                         (cuNNN: a CUDA that the pinned torch was built for and your driver runs)
# Check:                  docker run --rm ropext demo
# Use, as yourself, so that what is written is yours:
#   docker run --rm --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD:/data" -v "$HOME/.cache/huggingface:/cache" \
#     ropext plan /data/model --factor 4
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONDONTWRITEBYTECODE=1 HF_HOME=/cache

WORKDIR /src
# torch first, from its own index (the default one would bring gigabytes of CUDA to a CPU image), in
# a layer that changes of the source leave alone.
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' constraints.txt | pip install --index-url "$TORCH_INDEX" -r /dev/stdin
COPY pyproject.toml README.md LICENSE ./
COPY ropext ropext
COPY recipes recipes
RUN --mount=type=cache,target=/root/.cache/pip pip install -c constraints.txt .

# A number, which Kubernetes compares with runAsNonRoot. The image also works with a read-only root:
# docs/deploy.md.
RUN useradd --uid 10001 --create-home ropext && mkdir -p /data /cache && chown 10001 /data /cache
USER 10001
WORKDIR /data
VOLUME /cache
ENTRYPOINT ["ropext"]
CMD ["--help"]
