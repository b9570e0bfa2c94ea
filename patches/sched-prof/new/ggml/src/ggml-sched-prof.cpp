// SPDX-License-Identifier: MIT
#include "ggml-sched-prof.h"

#include "ggml-impl.h"

#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#ifndef _WIN32
#include <csignal>
#endif

struct prof_time {
    uint64_t runs  = 0;
    uint64_t bytes = 0;
    int64_t  ns    = 0;
};

struct prof_input {
    std::string src;
    std::string name;
    prof_time   time;
};

struct prof_split {
    std::string backend;
    std::string first;
    std::string last;
    int         n_nodes = 0;
    prof_time   time;

    std::vector<prof_input> inputs;
};

// splits, nodes, batch
using prof_shape = std::tuple<int, int, int64_t>;

struct prof_graph {
    prof_time               time;
    std::vector<prof_split> splits;
};

struct ggml_sched_prof {
    int  id     = 0;
    bool serial = false;

    // the run that is going on
    int64_t                 t_begin = 0;
    size_t                  bytes   = 0;
    int64_t                 batch   = 0;
    int                     n_nodes = 0;
    std::vector<prof_input> inputs;
    std::vector<prof_split> splits;

    std::map<prof_shape, prof_graph> graphs;

    int      printed_signal = 0;
    uint64_t runs           = 0;
    uint64_t printed_runs   = 0;
};

// The registry is never destroyed: schedulers may be freed by destructors that run after those of this library.
struct prof_registry {
    std::mutex                     mutex;
    std::vector<ggml_sched_prof *> alive;
    int                            n_made = 0;
    int                            mode   = 0;
    std::string                    file;
};

static std::atomic<int> g_prof_signal(0);

static void prof_print_all();

#ifndef _WIN32
static void prof_on_signal(int) {
    g_prof_signal.fetch_add(1);
}
#endif

static prof_registry & prof_get_registry() {
    static prof_registry * registry = [] {
        auto * reg = new prof_registry;
        const char * mode = getenv("GGML_SCHED_PROF");
        const char * file = getenv("GGML_SCHED_PROF_FILE");
        reg->mode = mode ? atoi(mode) : 0;
        reg->file = file ? file : "";
        if (reg->mode > 0) {
            atexit(prof_print_all);
#ifndef _WIN32
            // a program that uses the signal itself keeps it
            struct sigaction old;
            if (sigaction(SIGUSR1, nullptr, &old) == 0 && old.sa_handler == SIG_DFL) {
                struct sigaction act;
                memset(&act, 0, sizeof(act));
                act.sa_handler = prof_on_signal;
                act.sa_flags   = SA_RESTART;
                sigaction(SIGUSR1, &act, nullptr);
            }
#endif
        }
        return reg;
    }();
    return *registry;
}

int64_t ggml_sched_prof_now(void) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ggml_sched_prof * ggml_sched_prof_new(void) {
    prof_registry & reg = prof_get_registry();
    if (reg.mode != 1 && reg.mode != 2) {
        return nullptr;
    }
    auto * prof = new ggml_sched_prof;
    prof->serial = reg.mode == 2;
    std::lock_guard<std::mutex> lock(reg.mutex);
    prof->id             = reg.n_made++;
    prof->printed_signal = g_prof_signal.load();
    reg.alive.push_back(prof);
    return prof;
}

void ggml_sched_prof_begin(ggml_sched_prof * prof) {
    prof->inputs.clear();
    prof->splits.clear();
    prof->batch   = 0;
    prof->bytes   = 0;
    prof->n_nodes = 0;
    prof->t_begin = ggml_sched_prof_now();
}

void ggml_sched_prof_bytes(ggml_sched_prof * prof, size_t bytes) {
    prof->bytes += bytes;
}

void ggml_sched_prof_input(ggml_sched_prof * prof, ggml_backend_t src, ggml_backend_t dst,
        const struct ggml_tensor * input, int64_t t_start) {
    if (prof->serial) {
        ggml_backend_synchronize(dst);
    }
    prof_input in;
    in.src        = ggml_backend_name(src);
    in.name       = input->name;
    in.time.runs  = 1;
    in.time.bytes = prof->bytes > 0 ? prof->bytes : ggml_nbytes(input);
    in.time.ns    = ggml_sched_prof_now() - t_start;
    prof->bytes   = 0;
    prof->inputs.push_back(std::move(in));
}

// batches above 32 are put together by powers of two, so that prompts of all lengths give a few rows only
static int64_t prof_bucket(int64_t n) {
    int64_t b = n;
    if (n > 32) {
        for (b = 64; b < n; b *= 2) {}
    }
    return b;
}

void ggml_sched_prof_split(ggml_sched_prof * prof, ggml_backend_t backend, struct ggml_cgraph * graph, int64_t t_start) {
    if (prof->serial) {
        ggml_backend_synchronize(backend);
    }
    prof_split split;
    split.time.ns   = ggml_sched_prof_now() - t_start;
    split.time.runs = 1;
    split.backend   = ggml_backend_name(backend);
    split.n_nodes   = graph->n_nodes;
    if (graph->n_nodes > 0) {
        split.first = graph->nodes[0]->name;
        split.last  = graph->nodes[graph->n_nodes - 1]->name;
        if (prof->splits.empty()) {
            prof->batch = prof_bucket(graph->nodes[0]->ne[1]);
        }
    }
    split.inputs.swap(prof->inputs);
    prof->n_nodes += graph->n_nodes;
    prof->splits.push_back(std::move(split));
}

static void prof_add(prof_time & sum, const prof_time & one) {
    sum.runs  += one.runs;
    sum.bytes += one.bytes;
    sum.ns    += one.ns;
}

static void prof_print(ggml_sched_prof * prof);

void ggml_sched_prof_end(ggml_sched_prof * prof) {
    const prof_shape shape = std::make_tuple((int) prof->splits.size(), prof->n_nodes, prof->batch);

    prof_graph & graph = prof->graphs[shape];
    graph.time.runs += 1;
    graph.time.ns   += ggml_sched_prof_now() - prof->t_begin;

    // the same shape may be cut differently: then the later cut gets rows of its own after the first one's
    for (size_t i = 0; i < prof->splits.size(); i++) {
        prof_split & one = prof->splits[i];
        size_t at = i;
        while (at < graph.splits.size() && (graph.splits[at].backend != one.backend || graph.splits[at].first != one.first ||
                    graph.splits[at].last != one.last || graph.splits[at].inputs.size() != one.inputs.size())) {
            at++;
        }
        if (at >= graph.splits.size()) {
            graph.splits.push_back(std::move(one));
            continue;
        }
        prof_add(graph.splits[at].time, one.time);
        for (size_t j = 0; j < one.inputs.size(); j++) {
            prof_add(graph.splits[at].inputs[j].time, one.inputs[j].time);
        }
    }
    prof->runs++;

    const int signal = g_prof_signal.load();
    if (signal != prof->printed_signal) {
        prof->printed_signal = signal;
        std::lock_guard<std::mutex> lock(prof_get_registry().mutex);
        prof_print(prof);
    }
}

static double prof_ms(const prof_time & time) {
    return time.runs ? time.ns / 1e6 / time.runs : 0.0;
}

static void prof_print_table(FILE * out, const ggml_sched_prof * prof) {
    fprintf(out, "\nsched-prof: scheduler %d, %s\n", prof->id, prof->serial ?
            "serial: device times, nothing overlaps" :
            "host times: asynchronous work is counted where the host waits for it");
    for (const auto & it : prof->graphs) {
        const prof_graph & graph = it.second;
        int64_t ns_sum = 0;
        for (const prof_split & split : graph.splits) {
            ns_sum += split.time.ns;
            for (const prof_input & in : split.inputs) {
                ns_sum += in.time.ns;
            }
        }
        fprintf(out, "graph: batch %" PRId64 ", %d splits, %d nodes, %" PRIu64 " runs, %.3f ms a run, %.1f %% of it below\n",
                std::get<2>(it.first), std::get<0>(it.first), std::get<1>(it.first), graph.time.runs, prof_ms(graph.time),
                graph.time.ns ? 100.0*ns_sum/graph.time.ns : 0.0);
        fprintf(out, "  %4s %-12s %6s %8s %10s %12s %8s  %s\n", "#", "backend", "nodes", "runs", "ms/run", "bytes/run", "GB/s", "what");
        int n = 0;
        for (const prof_split & split : graph.splits) {
            for (const prof_input & in : split.inputs) {
                const double bytes = in.time.runs ? (double) in.time.bytes/in.time.runs : 0.0;
                fprintf(out, "  %4d %-12s %6s %8" PRIu64 " %10.4f %12.0f %8.2f  copy %s from %s\n", n, split.backend.c_str(), "-",
                        in.time.runs, prof_ms(in.time), bytes, in.time.ns ? (double) in.time.bytes/in.time.ns : 0.0,
                        in.name.c_str(), in.src.c_str());
            }
            fprintf(out, "  %4d %-12s %6d %8" PRIu64 " %10.4f %12s %8s  %s .. %s\n", n, split.backend.c_str(), split.n_nodes,
                    split.time.runs, prof_ms(split.time), "-", "-", split.first.c_str(), split.last.c_str());
            n++;
        }
    }
}

static std::string prof_quote(const std::string & text) {
    std::string out = "\"";
    for (unsigned char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += c < 0x20 ? ' ' : (char) c;
    }
    return out + "\"";
}

static void prof_print_jsonl(FILE * out, const ggml_sched_prof * prof) {
    for (const auto & it : prof->graphs) {
        fprintf(out, "{\"scheduler\":%d,\"serial\":%s,\"batch\":%" PRId64 ",\"n_splits\":%d,\"n_nodes\":%d,\"runs\":%" PRIu64
                ",\"ns\":%" PRId64 ",\"splits\":[", prof->id, prof->serial ? "true" : "false", std::get<2>(it.first),
                std::get<0>(it.first), std::get<1>(it.first), it.second.time.runs, it.second.time.ns);
        const char * sep = "";
        for (const prof_split & split : it.second.splits) {
            fprintf(out, "%s{\"backend\":%s,\"first\":%s,\"last\":%s,\"nodes\":%d,\"runs\":%" PRIu64 ",\"ns\":%" PRId64
                    ",\"inputs\":[", sep, prof_quote(split.backend).c_str(), prof_quote(split.first).c_str(),
                    prof_quote(split.last).c_str(), split.n_nodes, split.time.runs, split.time.ns);
            const char * sep_in = "";
            for (const prof_input & in : split.inputs) {
                fprintf(out, "%s{\"src\":%s,\"name\":%s,\"runs\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"ns\":%" PRId64 "}", sep_in,
                        prof_quote(in.src).c_str(), prof_quote(in.name).c_str(), in.time.runs, in.time.bytes, in.time.ns);
                sep_in = ",";
            }
            fprintf(out, "]}");
            sep = ",";
        }
        fprintf(out, "]}\n");
    }
}

// the registry is locked
static void prof_print(ggml_sched_prof * prof) {
    if (prof->runs == 0) {
        return;
    }
    prof->printed_runs = prof->runs;
    const std::string & file = prof_get_registry().file;
    FILE * out = file.empty() ? stderr : fopen(file.c_str(), "a");
    if (!out) {
        GGML_LOG_ERROR("%s: cannot open %s\n", __func__, file.c_str());
        return;
    }
    const bool jsonl = file.size() > 6 && file.compare(file.size() - 6, 6, ".jsonl") == 0;
    if (jsonl) {
        prof_print_jsonl(out, prof);
    } else {
        prof_print_table(out, prof);
    }
    if (out == stderr) {
        fflush(out);
    } else {
        fclose(out);
    }
}

static void prof_print_all() {
    prof_registry & reg = prof_get_registry();
    std::lock_guard<std::mutex> lock(reg.mutex);
    for (ggml_sched_prof * prof : reg.alive) {
        if (prof->runs != prof->printed_runs) {
            prof_print(prof);
        }
    }
}

void ggml_sched_prof_free(ggml_sched_prof * prof) {
    if (!prof) {
        return;
    }
    prof_registry & reg = prof_get_registry();
    std::lock_guard<std::mutex> lock(reg.mutex);
    if (prof->runs != prof->printed_runs) {
        prof_print(prof);
    }
    for (size_t i = 0; i < reg.alive.size(); i++) {
        if (reg.alive[i] == prof) {
            reg.alive.erase(reg.alive.begin() + i);
            break;
        }
    }
    delete prof;
}
