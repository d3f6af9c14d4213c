# An image that trains on CPUs and NVIDIA GPUs: docker build -t largebatch .
# torch brings CUDA's libraries; the host needs NVIDIA's driver and container toolkit (docker run --gpus all).
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock .
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY . .
# Loading workers hand over images in shared memory: docker run --shm-size 8g, or --ipc host.
ENTRYPOINT ["python", "train.py"]
