# A populator, its verifier and its server: the base of the package, without torch.
#
#   docker build -f docker/populator.Dockerfile -t genesis-populator .
#   mkdir -p store
#   docker run --rm --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD/store:/store" genesis-populator populate --source fineweb-edu --store /store
#   docker run --rm -v "$PWD/store:/store:ro" -p 8000:8000 genesis-populator serve --store /store --host 0.0.0.0
FROM python:3.12-slim
WORKDIR /opt/genesis
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY manifests manifests
COPY genesis genesis
COPY loader loader
COPY trainer trainer
RUN pip install --no-cache-dir --constraint constraints.txt . \
    && useradd --create-home genesis \
    && mkdir /store && chown genesis /store
USER genesis
WORKDIR /home/genesis
ENTRYPOINT ["genesis"]
CMD ["--help"]
