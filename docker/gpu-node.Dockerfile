# A training node on an NVIDIA GPU. PyPI's torch for Linux brings the CUDA libraries; the host has the driver and
# NVIDIA's container toolkit. gcc is for torch.compile, which builds its kernels' launchers at run time.
#
#   docker build -f docker/gpu-node.Dockerfile -t genesis-node .
#   docker run --rm --gpus all --ipc host --network host -v genesis-node:/home/genesis/.neuroshard genesis-node \
#       --node-id gpu-7 --store https://cdn.example.org --port 4001 --initial-peers HOST:4001
#
# Behind a forwarded port say what others are to dial: --public-address HOST:4001.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/genesis
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY manifests manifests
COPY genesis genesis
COPY loader loader
COPY trainer trainer
RUN pip install --no-cache-dir --constraint constraints.txt '.[train,dht]' \
    && useradd --create-home genesis \
    && mkdir /home/genesis/.neuroshard && chown genesis /home/genesis/.neuroshard
USER genesis
WORKDIR /home/genesis
EXPOSE 4001
ENTRYPOINT ["python", "-m", "trainer"]
CMD ["--help"]
