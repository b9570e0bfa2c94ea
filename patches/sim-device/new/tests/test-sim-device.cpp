// SPDX-License-Identifier: MIT

// What the simulated devices promise, one case a run: test-sim-device CASE. The environment sets the devices up.
// Cases named race-* and read-* plant a fault that the simulation has to catch: they end the program when it does.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-sim.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

static double now_ms() {
    return ggml_time_us()/1000.0;
}

static ggml_backend_dev_t device(int i) {
    const std::string name = "SIM" + std::to_string(i);
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
    if (!dev) {
        fprintf(stderr, "no %s: set GGML_SIM_DEVICES\n", name.c_str());
        exit(2);
    }
    return dev;
}

static ggml_backend_ptr queue(int i) {
    return ggml_backend_ptr(ggml_backend_dev_init(device(i), nullptr));
}

// n_threads 0: as many as it takes by itself
static ggml_backend_ptr cpu_backend(int n_threads = 0) {
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (n_threads > 0) {
        const auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu.get())), "ggml_backend_set_n_threads");
        set_threads(cpu.get(), n_threads);
    }
    return cpu;
}

// A context whose tensors all lie in one buffer of the given type.
struct place {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

    place() : ctx(ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })) {}

    bool alloc(ggml_backend_buffer_type_t buft) {
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        return buffer != nullptr;
    }
};

static ggml_tensor * named(ggml_tensor * t, const char * name) {
    ggml_set_name(t, name);
    return t;
}

// y = w*(w*(...x)): *depth* matrix products of n x n, some work of known length
struct chain {
    place         p;
    ggml_tensor * w;
    ggml_tensor * x;
    ggml_tensor * y;
    ggml_cgraph * graph;
    int           n;

    chain(ggml_backend_buffer_type_t buft, int n, int depth) : n(n) {
        ggml_context * ctx = p.ctx.get();
        w = named(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n), "w");
        x = named(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, 1), "x");
        y = x;
        for (int i = 0; i < depth; i++) {
            y = named(ggml_mul_mat(ctx, w, y), ("y" + std::to_string(i)).c_str());
        }
        graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, y);
        GGML_ASSERT(p.alloc(buft));
        // w is a permutation (next row), so y is x turned by depth places, exactly
        std::vector<float> data((size_t) n*n, 0.0f);
        for (int i = 0; i < n; i++) {
            data[(size_t) i*n + (i + 1)%n] = 1.0f;
        }
        ggml_backend_tensor_set(w, data.data(), 0, ggml_nbytes(w));
    }

    void set(float first) {
        std::vector<float> data(n);
        for (int i = 0; i < n; i++) {
            data[i] = first + i;
        }
        ggml_backend_tensor_set(x, data.data(), 0, ggml_nbytes(x));
    }

    std::vector<float> get() const {
        std::vector<float> data(n);
        ggml_backend_tensor_get(y, data.data(), 0, ggml_nbytes(y));
        return data;
    }
};

static void expect(bool ok, const char * what) {
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what);
        exit(1);
    }
}
#define EXPECT(x) expect(x, #x)

static double time_of(const std::function<void()> & work) {
    const double start = now_ms();
    work();
    return now_ms() - start;
}

// both() over the longer of a() and b(), each the least of several rounds: other work on the machine only adds
// "machine": what two plain threads of this machine manage at the same time, which nothing of ours can beat; a second
// core may be half of one
static int overlap(const std::function<void()> & a, const std::function<void()> & b, const std::function<void()> & both) {
    auto one = cpu_backend(1);
    auto two = cpu_backend(1);
    chain c(ggml_backend_get_default_buffer_type(one.get()), 1024, 20);
    chain d(ggml_backend_get_default_buffer_type(two.get()), 1024, 20);
    c.set(1);
    d.set(1);
    const auto plain = [&] { ggml_backend_graph_compute(one.get(), c.graph); };

    double ta = 1e9, tb = 1e9, tab = 1e9, tc = 1e9, tcd = 1e9;
    for (int round = 0; round < 20; round++) {
        ta  = std::min(ta,  time_of(a));
        tb  = std::min(tb,  time_of(b));
        tab = std::min(tab, time_of(both));
        tc  = std::min(tc,  time_of(plain));
        tcd = std::min(tcd, time_of([&] {
            std::thread other([&] { ggml_backend_graph_compute(two.get(), d.graph); });
            plain();
            other.join();
        }));
    }
    printf("{\"a_ms\": %.3f, \"b_ms\": %.3f, \"both_ms\": %.3f, \"ratio\": %.3f, \"machine\": %.3f}\n",
        ta, tb, tab, tab/std::max(ta, tb), tcd/tc);
    return 0;
}

static int case_overlap_cpu() {
    auto sim = queue(0);
    auto cpu = cpu_backend(1);
    chain a(ggml_backend_dev_buffer_type(device(0)), 1024, 20);
    chain b(ggml_backend_get_default_buffer_type(cpu.get()), 1024, 20);
    a.set(1);
    b.set(1);
    return overlap(
        [&] { ggml_backend_graph_compute(sim.get(), a.graph); },
        [&] { ggml_backend_graph_compute(cpu.get(), b.graph); },
        [&] {
            ggml_backend_graph_compute_async(sim.get(), a.graph);
            ggml_backend_graph_compute(cpu.get(), b.graph);
            ggml_backend_synchronize(sim.get());
        });
}

static int case_overlap_two() {
    auto one = queue(0);
    auto two = queue(1);
    chain a(ggml_backend_dev_buffer_type(device(0)), 1024, 20);
    chain b(ggml_backend_dev_buffer_type(device(1)), 1024, 20);
    a.set(1);
    b.set(1);
    return overlap(
        [&] { ggml_backend_graph_compute(one.get(), a.graph); },
        [&] { ggml_backend_graph_compute(two.get(), b.graph); },
        [&] {
            ggml_backend_graph_compute_async(one.get(), a.graph);
            ggml_backend_graph_compute_async(two.get(), b.graph);
            ggml_backend_synchronize(one.get());
            ggml_backend_synchronize(two.get());
        });
}

// uploads hide behind a graph of another queue of the same device
static int case_overlap_upload() {
    auto compute = queue(0);
    auto upload  = queue(0);
    chain a(ggml_backend_dev_buffer_type(device(0)), 1024, 20);
    a.set(1);
    place slot, host;
    ggml_tensor * bank   = named(ggml_new_tensor_1d(slot.ctx.get(), GGML_TYPE_F32, 1 << 20), "bank");
    ggml_tensor * source = ggml_new_tensor_1d(host.ctx.get(), GGML_TYPE_F32, 1 << 20);
    GGML_ASSERT(slot.alloc(ggml_backend_dev_buffer_type(device(0))));
    GGML_ASSERT(host.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    const auto send = [&] { ggml_backend_tensor_set_async(upload.get(), bank, source->data, 0, ggml_nbytes(bank)); };
    return overlap(
        [&] { ggml_backend_graph_compute(compute.get(), a.graph); },
        [&] { send(); ggml_backend_synchronize(upload.get()); },
        [&] {
            ggml_backend_graph_compute_async(compute.get(), a.graph);
            send();
            ggml_backend_synchronize(upload.get());
            ggml_backend_synchronize(compute.get());
        });
}

// what is queued runs in order, and a graph may be rebuilt or freed as soon as it is launched
static int case_order() {
    auto sim = queue(0);
    const int n = 64, depth = 3;
    place out;
    ggml_tensor * pinned = ggml_new_tensor_1d(out.ctx.get(), GGML_TYPE_F32, n);
    GGML_ASSERT(out.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    for (int round = 0; round < 50; round++) {
        chain c(ggml_backend_dev_buffer_type(device(0)), n, depth);
        std::vector<float> x(n);
        for (int i = 0; i < n; i++) {
            x[i] = (float) (round + i);
        }
        ggml_backend_tensor_set_async(sim.get(), c.x, x.data(), 0, ggml_nbytes(c.x));
        std::fill(x.begin(), x.end(), -1.0f); // pageable: staged before the call returned
        ggml_backend_graph_compute_async(sim.get(), c.graph);
        memset(c.y->src, 0, sizeof(c.y->src)); // the launched graph is a copy
        ggml_backend_tensor_get_async(sim.get(), c.y, pinned->data, 0, ggml_nbytes(c.y));
        ggml_backend_synchronize(sim.get());
        for (int i = 0; i < n; i++) {
            EXPECT(((float *) pinned->data)[i] == (float) (round + (i + depth)%n));
        }
    }
    return 0;
}

static int case_events() {
    auto one = queue(0);
    auto two = queue(0);
    ggml_backend_event_ptr event(ggml_backend_event_new(device(0)));
    ggml_backend_event_wait(two.get(), event.get()); // never recorded: nothing to wait for
    ggml_backend_event_synchronize(event.get());
    chain c(ggml_backend_dev_buffer_type(device(0)), 512, 10);
    for (int round = 0; round < 20; round++) {
        c.set((float) round);
        ggml_backend_graph_compute_async(one.get(), c.graph);
        ggml_backend_event_record(event.get(), one.get());
        ggml_backend_event_wait(two.get(), event.get());
        std::vector<float> got(c.n);
        ggml_backend_tensor_get_async(two.get(), c.y, got.data(), 0, ggml_nbytes(c.y));
        ggml_backend_synchronize(two.get());
        EXPECT(got[0] == (float) (round + 10));
        ggml_backend_event_synchronize(event.get());
        EXPECT(c.get()[1] == (float) (round + 11));
    }
    return 0;
}

static int case_memory() {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device(0));
    size_t free0, total, free1;
    ggml_backend_dev_memory(device(0), &free0, &total);
    EXPECT(free0 == total);
    ggml_backend_buffer_ptr half(ggml_backend_buft_alloc_buffer(buft, total/2));
    EXPECT(half != nullptr);
    ggml_backend_dev_memory(device(0), &free1, &total);
    EXPECT(free1 == total - total/2);
    EXPECT(ggml_backend_buft_alloc_buffer(buft, free1 + 1) == nullptr);
    ggml_backend_buffer_ptr rest(ggml_backend_buft_alloc_buffer(buft, free1));
    EXPECT(rest != nullptr);
    ggml_backend_dev_memory(device(0), &free1, &total);
    EXPECT(free1 == 0);
    rest.reset();
    half.reset();
    ggml_backend_dev_memory(device(0), &free1, &total);
    EXPECT(free1 == total);
    EXPECT(!ggml_backend_buft_is_host(buft));
    EXPECT(ggml_backend_buft_is_host(ggml_backend_dev_host_buffer_type(device(0))));
    return 0;
}

static int case_max_alloc() {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device(0));
    const size_t limit = ggml_backend_buft_get_max_size(buft);
    printf("{\"max\": %zu}\n", limit);
    EXPECT(ggml_backend_buft_alloc_buffer(buft, limit + 1) == nullptr);
    // the allocator splits what is larger
    place p;
    for (int i = 0; i < 4; i++) {
        ggml_new_tensor_1d(p.ctx.get(), GGML_TYPE_I8, (int64_t) limit*3/4);
    }
    EXPECT(p.alloc(buft));
    return 0;
}

static int case_read_uninitialised() {
    auto sim = queue(0);
    chain c(ggml_backend_dev_buffer_type(device(0)), 64, 1);
    ggml_backend_graph_compute(sim.get(), c.graph); // x was never set
    const std::vector<float> y = c.get();
    printf("{\"nan\": %s}\n", std::isnan(y[0]) ? "true" : "false");
    return 0;
}

static int case_read_from_host() {
    chain c(ggml_backend_dev_buffer_type(device(0)), 64, 1);
    c.set(1);
    printf("%f\n", ((volatile float *) c.x->data)[0]); // device memory: must not be readable
    return 0;
}

static int case_leak() {
    ggml_backend_buffer_t lost = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device(0)), 12345);
    EXPECT(lost != nullptr);
    return 0; // GGML_SIM_STATS tells
}

// rates: time and count copies of 4 MiB
static int case_rates() {
    auto sim = queue(0);
    place d, pinned, pageable;
    ggml_tensor * t = ggml_new_tensor_1d(d.ctx.get(), GGML_TYPE_I8, 4 << 20);
    ggml_tensor * h = ggml_new_tensor_1d(pinned.ctx.get(), GGML_TYPE_I8, 4 << 20);
    GGML_ASSERT(d.alloc(ggml_backend_dev_buffer_type(device(0))));
    GGML_ASSERT(pinned.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    memset(h->data, 1, 4 << 20);
    std::vector<uint8_t> v(4 << 20, 1);
    const auto ms = [&](const void * from) {
        return time_of([&] { ggml_backend_tensor_set_async(sim.get(), t, from, 0, 4 << 20); ggml_backend_synchronize(sim.get()); });
    };
    const double t_pinned   = ms(h->data);
    const double t_pageable = ms(v.data());
    const double t_down     = time_of([&] { ggml_backend_tensor_get(t, v.data(), 0, 4 << 20); });
    printf("{\"pinned_ms\": %.3f, \"pageable_ms\": %.3f, \"down_ms\": %.3f, \"pinned\": %s}\n", t_pinned, t_pageable, t_down,
        strcmp(ggml_backend_buffer_name(pinned.buffer.get()), "SIM_Host") == 0 ? "true" : "false");
    return 0;
}

static int case_host_slow() {
    auto cpu = cpu_backend();
    chain c(ggml_backend_get_default_buffer_type(cpu.get()), 1024, 20);
    c.set(1);
    double best = 1e9;
    for (int i = 0; i < 10; i++) {
        best = std::min(best, time_of([&] { ggml_backend_graph_compute(cpu.get(), c.graph); }));
    }
    printf("{\"ms\": %.3f}\n", best);
    return 0;
}

static int case_device_copy() {
    auto one = queue(0);
    auto two = queue(1);
    chain a(ggml_backend_dev_buffer_type(device(0)), 256, 4);
    chain b(ggml_backend_dev_buffer_type(device(1)), 256, 4);
    a.set(5);
    ggml_backend_graph_compute_async(one.get(), a.graph);
    ggml_backend_tensor_copy_async(one.get(), two.get(), a.y, b.x);
    ggml_backend_graph_compute_async(two.get(), b.graph);
    ggml_backend_synchronize(two.get());
    ggml_backend_synchronize(one.get());
    EXPECT(b.get()[0] == 5 + 8);
    return 0;
}

// Planted faults

static int case_race_write_while_reading() {
    auto sim = queue(0);
    chain c(ggml_backend_dev_buffer_type(device(0)), 256, 4);
    c.set(1);
    ggml_backend_graph_compute_async(sim.get(), c.graph);
    c.set(2); // a blocking copy is not ordered with the queue
    return 0;
}

static int case_race_two_queues() {
    auto one = queue(0);
    auto two = queue(0);
    chain c(ggml_backend_dev_buffer_type(device(0)), 256, 4);
    c.set(1);
    std::vector<float> got(c.n);
    ggml_backend_graph_compute_async(one.get(), c.graph);
    ggml_backend_tensor_get_async(two.get(), c.y, got.data(), 0, ggml_nbytes(c.y)); // no event between the two
    return 0;
}

static int case_race_copy_over_reader() {
    auto one = queue(0);
    auto two = queue(1);
    chain a(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    chain b(ggml_backend_dev_buffer_type(device(1)), 256, 1);
    a.set(1);
    b.set(1);
    ggml_backend_graph_compute_async(two.get(), b.graph);
    ggml_backend_tensor_copy_async(one.get(), two.get(), a.x, b.x); // runs on the source's queue: the reader may not be done
    return 0;
}

static int case_race_host_buffer() {
    auto sim = queue(0);
    auto cpu = cpu_backend();
    chain c(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    chain h(ggml_backend_dev_host_buffer_type(device(0)), 256, 1);
    c.set(1);
    ggml_backend_tensor_get_async(sim.get(), c.x, h.x->data, 0, ggml_nbytes(h.x));
    ggml_backend_graph_compute(cpu.get(), h.graph); // reads what is still being downloaded
    return 0;
}

static int case_race_free() {
    auto sim = queue(0);
    {
        chain c(ggml_backend_dev_buffer_type(device(0)), 256, 4);
        c.set(1);
        ggml_backend_graph_compute_async(sim.get(), c.graph);
    }
    return 0;
}

static int case_race_blocking_copy_to_host() {
    auto sim = queue(0);
    chain a(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    chain b(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    place host;
    ggml_tensor * h = named(ggml_new_tensor_1d(host.ctx.get(), GGML_TYPE_F32, 256), "h");
    GGML_ASSERT(host.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    a.set(1);
    b.set(2);
    ggml_backend_tensor_set_async(sim.get(), a.x, h->data, 0, ggml_nbytes(h));
    ggml_backend_tensor_get(b.x, h->data, 0, ggml_nbytes(h)); // writes what the queue may still send
    return 0;
}

static int case_race_set_host() {
    auto sim = queue(0);
    chain c(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    place host;
    ggml_tensor * h = named(ggml_new_tensor_1d(host.ctx.get(), GGML_TYPE_F32, 256), "h");
    GGML_ASSERT(host.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    const std::vector<float> next(256, 1.0f);
    ggml_backend_tensor_set_async(sim.get(), c.x, h->data, 0, ggml_nbytes(h));
    ggml_backend_tensor_set(h, next.data(), 0, ggml_nbytes(h));
    return 0;
}

static int case_race_send_while_receiving() {
    auto sim = queue(0);
    chain a(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    chain b(ggml_backend_dev_buffer_type(device(0)), 256, 1);
    place host;
    ggml_tensor * h = named(ggml_new_tensor_1d(host.ctx.get(), GGML_TYPE_F32, 256), "h");
    GGML_ASSERT(host.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    a.set(1);
    ggml_backend_tensor_get_async(sim.get(), a.x, h->data, 0, ggml_nbytes(h));
    ggml_backend_tensor_set(b.x, h->data, 0, ggml_nbytes(h)); // reads what may not have come yet
    return 0;
}

enum experts_order {
    NOTHING,  // orders the upload
    HOST,     // waits for the graph
    EVENT,    // of the graph, for which the upload's queue waits
    BLOCKING, // the upload is a blocking copy, made at once
};

// A graph reads some experts of a bank while another is uploaded to it: legal if it is one that no token uses.
static int experts(int upload_to, experts_order order) {
    auto compute = queue(0);
    auto upload  = queue(0);
    const int n = 64, n_expert = 4, n_used = 2;
    place p, host;
    ggml_context * ctx = p.ctx.get();
    ggml_tensor * bank = named(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n, n, n_expert), "bank");
    ggml_tensor * x    = named(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n, 1, 1), "x");
    ggml_tensor * ids  = named(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, 1), "ids");
    ggml_tensor * y    = named(ggml_mul_mat_id(ctx, bank, x, ids), "y");
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, y);
    GGML_ASSERT(p.alloc(ggml_backend_dev_buffer_type(device(0))));
    chain before(ggml_backend_dev_buffer_type(device(0)), 1024, 30); // the graph gets to its ids late
    before.set(1);
    ggml_tensor * source = ggml_new_tensor_2d(host.ctx.get(), GGML_TYPE_F32, n, n);
    GGML_ASSERT(host.alloc(ggml_backend_dev_host_buffer_type(device(0))));
    memset(source->data, 0, ggml_nbytes(source));
    ggml_backend_buffer_clear(p.buffer.get(), 0);
    const int32_t used[] = { 0, 2 };
    ggml_backend_tensor_set(ids, used, 0, sizeof(used));

    ggml_backend_graph_compute_async(compute.get(), before.graph);
    ggml_backend_graph_compute_async(compute.get(), graph);
    ggml_backend_event_ptr event(ggml_backend_event_new(device(0)));
    if (order == HOST) {
        ggml_backend_synchronize(compute.get());
    } else if (order == EVENT) {
        ggml_backend_event_record(event.get(), compute.get());
        ggml_backend_event_wait(upload.get(), event.get());
    }
    if (order == BLOCKING) {
        ggml_backend_tensor_set(bank, source->data, upload_to*bank->nb[2], bank->nb[2]);
    } else {
        ggml_backend_tensor_set_async(upload.get(), bank, source->data, upload_to*bank->nb[2], bank->nb[2]);
    }
    ggml_backend_synchronize(upload.get());
    ggml_backend_synchronize(compute.get());
    return 0;
}

// A queue that waits for another's event is idle; an upload from pageable memory holds its caller once it is large.
static int case_waits() {
    auto one = queue(0);
    auto two = queue(0);
    chain c(ggml_backend_dev_buffer_type(device(0)), 1024, 30);
    c.set(1);
    ggml_backend_event_ptr event(ggml_backend_event_new(device(0)));
    for (int round = 0; round < 10; round++) { // the second queue's worker may come late, and find nothing to wait for
        ggml_backend_graph_compute_async(one.get(), c.graph);
        ggml_backend_event_record(event.get(), one.get());
        ggml_backend_event_wait(two.get(), event.get());
        ggml_backend_synchronize(two.get());
    }
    place p;
    ggml_tensor * large = ggml_new_tensor_1d(p.ctx.get(), GGML_TYPE_I8, 1 << 20);
    ggml_tensor * small = ggml_new_tensor_1d(p.ctx.get(), GGML_TYPE_I8, 1 << 10);
    GGML_ASSERT(p.alloc(ggml_backend_dev_buffer_type(device(0))));
    std::vector<uint8_t> v(1 << 20, 1);
    const double t_small = time_of([&] { ggml_backend_tensor_set_async(one.get(), small, v.data(), 0, 1 << 10); });
    const double t_large = time_of([&] { ggml_backend_tensor_set_async(one.get(), large, v.data(), 0, 1 << 20); });
    std::fill(v.begin(), v.end(), 2); // both have been read
    ggml_backend_synchronize(one.get());
    std::vector<uint8_t> got(1 << 20);
    ggml_backend_tensor_get(large, got.data(), 0, got.size());
    EXPECT(got[0] == 1 && got[got.size() - 1] == 1);
    printf("{\"small_ms\": %.3f, \"large_ms\": %.3f}\n", t_small, t_large);
    return 0;
}

static const std::map<std::string, std::function<int()>> cases = {
    { "overlap-cpu",              case_overlap_cpu },
    { "overlap-two",              case_overlap_two },
    { "overlap-upload",           case_overlap_upload },
    { "order",                    case_order },
    { "events",                   case_events },
    { "memory",                   case_memory },
    { "max-alloc",                case_max_alloc },
    { "rates",                    case_rates },
    { "waits",                    case_waits },
    { "host-slow",                case_host_slow },
    { "device-copy",              case_device_copy },
    { "leak",                     case_leak },
    { "experts-other",            [] { return experts(1, NOTHING);  } },
    { "experts-other-blocking",   [] { return experts(1, BLOCKING); } },
    { "experts-after-host",       [] { return experts(2, HOST);     } },
    { "experts-after-event",      [] { return experts(2, EVENT);    } },
    { "race-experts",             [] { return experts(2, NOTHING);  } },
    { "race-experts-blocking",    [] { return experts(2, BLOCKING); } },
    { "race-write-while-reading", case_race_write_while_reading },
    { "race-two-queues",          case_race_two_queues },
    { "race-copy-over-reader",    case_race_copy_over_reader },
    { "race-host-buffer",         case_race_host_buffer },
    { "race-blocking-to-host",    case_race_blocking_copy_to_host },
    { "race-set-host",            case_race_set_host },
    { "race-send-while-receiving", case_race_send_while_receiving },
    { "race-free",                case_race_free },
    { "read-uninitialised",       case_read_uninitialised },
    { "read-from-host",           case_read_from_host },
};

int main(int argc, char ** argv) {
    const auto found = argc == 2 ? cases.find(argv[1]) : cases.end();
    if (found == cases.end()) {
        fprintf(stderr, "usage: %s CASE, one of:\n", argv[0]);
        for (const auto & c : cases) {
            fprintf(stderr, "  %s\n", c.first.c_str());
        }
        return 2;
    }
    ggml_time_init();
    const int code = found->second();
    fprintf(stderr, "%s: done\n", argv[1]);
    return code;
}
