// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpp.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

// Copies experts to one device beside its computations: a thread with its own backend, so that the copies go through a
// queue of their own. Sources that the device cannot read by itself are staged in its pinned memory, if it has any.
class llama_expert_uploader {
public:
    struct part {
        const ggml_tensor * src; // in host memory
        ggml_tensor *       dst;
        size_t              src_offset, dst_offset, size; // bytes
    };
    struct job {
        int64_t           id;
        std::vector<part> parts;
    };
    struct result {
        int64_t  id;
        bool     ok;
        uint64_t bytes;
        int64_t  us; // from the first byte to the last, waiting included
    };

    // fail_every: each such job stops half way, for tests (0: none); lie: it is called done nevertheless.
    // Throws if the device gives no second queue.
    llama_expert_uploader(ggml_backend_dev_t dev, int32_t fail_every, bool lie);
    ~llama_expert_uploader(); // what has not begun is dropped

    void push(job && j);

    // Those done since the last call. wait: all that were pushed; waited: whether that took any time.
    std::vector<result> poll(bool wait, bool * waited = nullptr);

private:
    void run();
    bool copy(const job & j);
    void copy(const part & p);

    ggml_backend_ptr           backend;
    ggml_backend_buffer_type_t host_buft;
    ggml_backend_buffer_ptr    stage; // two halves: one is filled while the other is read
    int                        half = 0;

    const int32_t fail_every;
    const bool    lie;
    int32_t       n_jobs = 0;

    std::mutex              mutex;
    std::condition_variable work, done;
    std::deque<job>         queue;
    std::vector<result>     results;
    bool                    busy = false;
    bool                    stop = false;
    std::thread             thread; // last: it uses the others
};
