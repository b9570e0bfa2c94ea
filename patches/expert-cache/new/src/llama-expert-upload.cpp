// SPDX-License-Identifier: MIT

#include "llama-expert-upload.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

static constexpr size_t STAGE_HALF = 4u << 20;

llama_expert_uploader::llama_expert_uploader(ggml_backend_dev_t dev, int32_t fail_every, bool lie) : fail_every(fail_every), lie(lie) {
    backend.reset(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        throw std::runtime_error(std::string("no second queue on ") + ggml_backend_dev_name(dev));
    }
    host_buft = ggml_backend_dev_host_buffer_type(dev);
    if (host_buft) {
        stage.reset(ggml_backend_buft_alloc_buffer(host_buft, 2*STAGE_HALF));
    }
    thread = std::thread([this] { run(); });
}

llama_expert_uploader::~llama_expert_uploader() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    work.notify_all();
    thread.join();
}

void llama_expert_uploader::push(job && j) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        queue.push_back(std::move(j));
    }
    work.notify_one();
}

std::vector<llama_expert_uploader::result> llama_expert_uploader::poll(bool wait, bool * waited) {
    std::unique_lock<std::mutex> lock(mutex);
    const bool pending = wait && (busy || !queue.empty());
    if (waited) {
        *waited = pending;
    }
    if (pending) {
        done.wait(lock, [&] { return !busy && queue.empty(); });
    }
    std::vector<result> list;
    list.swap(results);
    return list;
}

void llama_expert_uploader::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        work.wait(lock, [&] { return stop || !queue.empty(); });
        if (stop) {
            return;
        }
        const job j = std::move(queue.front());
        queue.pop_front();
        busy = true;
        lock.unlock();

        const int64_t t_start = ggml_time_us();
        const bool ok = copy(j);
        uint64_t bytes = 0;
        for (const part & p : j.parts) {
            bytes += p.size;
        }
        const result r = { j.id, ok, bytes, ggml_time_us() - t_start };

        lock.lock();
        busy = false;
        results.push_back(r);
        done.notify_all();
    }
}

bool llama_expert_uploader::copy(const job & j) {
    const bool fail = fail_every > 0 && ++n_jobs % fail_every == 0;
    for (size_t i = 0; i < j.parts.size() && !(fail && i > 0); i++) {
        copy(j.parts[i]);
    }
    ggml_backend_synchronize(backend.get());
    return !fail || lie;
}

void llama_expert_uploader::copy(const part & p) {
    const char * src = (const char *) p.src->data + p.src_offset;
    if (!stage || ggml_backend_buffer_get_type(p.src->buffer) == host_buft) {
        ggml_backend_tensor_set_async(backend.get(), p.dst, src, p.dst_offset, p.size);
        return;
    }
    for (size_t at = 0; at < p.size; at += STAGE_HALF) {
        const size_t n = std::min(STAGE_HALF, p.size - at);
        char * to = (char *) ggml_backend_buffer_get_base(stage.get()) + half*STAGE_HALF;
        memcpy(to, src + at, n); // while the other half is on its way
        ggml_backend_synchronize(backend.get());
        ggml_backend_tensor_set_async(backend.get(), p.dst, to, p.dst_offset + at, n);
        half ^= 1;
    }
}
