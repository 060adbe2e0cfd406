# CPU image by default:   docker build -t ropext .
# CUDA image:             docker build -t ropext --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# Use:                    docker run --rm -v "$PWD:/data" -v hf-cache:/home/ropext/.cache/huggingface ropext plan /data/model --factor 4
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONDONTWRITEBYTECODE=1 HF_HOME=/home/ropext/.cache/huggingface

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY ropext ropext
# torch from its own index first: the default index would bring gigabytes of CUDA to a CPU image.
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' constraints.txt | pip install --index-url "$TORCH_INDEX" -r /dev/stdin \
    && pip install -c constraints.txt .

RUN useradd --create-home ropext && mkdir -p /data "$HF_HOME" && chown -R ropext /data "$HF_HOME"
USER ropext
WORKDIR /data
ENTRYPOINT ["ropext"]
CMD ["--help"]
