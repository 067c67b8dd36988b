# To try it: docker build -t saccade . && docker run --rm saccade
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
COPY . /saccade
RUN make -C /saccade demo
CMD ["make", "-C", "/saccade", "demo"]
