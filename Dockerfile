# An image that trains on CPUs and NVIDIA GPUs: docker build -t largebatch .
# torch brings CUDA's libraries; the host needs NVIDIA's driver and container toolkit (docker run --gpus all).
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock .
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
# For checkpoint.mirror in an object store, of the version of fsspec in requirements.lock: docker build --build-arg STORE=s3fs==2026.9.0 ...
ARG STORE=
RUN if [ -n "$STORE" ]; then pip install --no-cache-dir "$STORE"; fi
COPY . .
# Loading workers hand over images in shared memory: docker run --shm-size 8g, or --ipc host.
ENTRYPOINT ["python", "train.py"]
