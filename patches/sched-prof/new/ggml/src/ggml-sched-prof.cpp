// SPDX-License-Identifier: MIT
#include "ggml-sched-prof.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#ifdef _WIN32
#include <process.h>
#define getpid _getpid
#else
#include <csignal>
#include <unistd.h>
#endif

#define PROF_MAX_GRAPHS  256 // kept
#define PROF_MAX_PRINTED 8   // in a table; JSON lines have all

// one part of the run that is going on; the tensors live until its end

struct prof_part {
    int                 split_id;
    ggml_backend_t      src;   // of an input
    const ggml_tensor * input;
    ggml_backend_t      dst;
    ggml_cgraph       * graph; // of a split
    uint64_t            bytes;
    int64_t             ns;
    int64_t             ns_wait;
};

// sums over runs; all names are copies

struct prof_input {
    std::string src;
    std::string name;
    uint64_t    runs  = 0;
    uint64_t    bytes = 0;
    int64_t     ns    = 0;
};

struct prof_split {
    std::string backend;
    std::string first;
    std::string last;
    int         n_nodes = 0;
    int64_t     ns      = 0;
    int64_t     ns_wait = 0; // before it: the host waited for another backend

    std::vector<prof_input> inputs;
};

// hash of the splits' names, number of splits, batch
using prof_key = std::tuple<uint64_t, size_t, int64_t>;

struct prof_graph {
    uint64_t runs    = 0;
    int64_t  ns      = 0;
    int64_t  batch   = 0;
    int      n_nodes = 0;

    std::vector<prof_split> splits;
};

struct ggml_sched_prof {
    int  id     = 0;
    bool serial = false;

    // the run that is going on
    int64_t                t_begin = 0;
    int64_t                t_last  = 0; // end of the last part
    uint64_t               bytes   = 0;
    std::vector<prof_part> parts;

    // a graph that is reused keeps the uids of its splits, then no name has to be looked at
    uint64_t     last_uid      = 0;
    size_t       last_n_splits = 0;
    prof_graph * last_graph    = nullptr;

    std::map<prof_key, prof_graph> graphs;

    uint64_t runs           = 0;
    uint64_t runs_dropped   = 0;
    uint64_t runs_printed   = 0;
    int      n_prints       = 0;
    int      signal_printed = 0;
};

// Never destroyed: a scheduler may be freed by a destructor that runs after those of this library.
struct prof_registry {
    std::mutex                     mutex; // this struct, and the sums of all schedulers
    std::vector<ggml_sched_prof *> alive;
    int                            n_made = 0;
    int                            mode   = 0;
    std::string                    file;
};

static std::atomic<int> g_prof_signal(0);

#ifndef _WIN32
static_assert(std::atomic<int>::is_always_lock_free, "the signal handler needs it");

static void prof_on_signal(int) {
    g_prof_signal.fetch_add(1);
}

static bool prof_signal_handler_is(void (*handler)(int)) {
    struct sigaction act;
    return sigaction(SIGUSR1, nullptr, &act) == 0 && !(act.sa_flags & SA_SIGINFO) && act.sa_handler == handler;
}

static void prof_set_signal_handler(void (*handler)(int)) {
    struct sigaction act;
    memset(&act, 0, sizeof(act));
    sigemptyset(&act.sa_mask);
    act.sa_handler = handler;
    act.sa_flags   = SA_RESTART;
    sigaction(SIGUSR1, &act, nullptr);
}
#endif

static void prof_at_exit();

static prof_registry & prof_get_registry() {
    static prof_registry * registry = [] {
        auto * reg = new prof_registry;
        const char * GGML_SCHED_PROF      = getenv("GGML_SCHED_PROF");
        const char * GGML_SCHED_PROF_FILE = getenv("GGML_SCHED_PROF_FILE");
        const std::string mode = GGML_SCHED_PROF ? GGML_SCHED_PROF : "";
        reg->mode = mode == "1" ? 1 : mode == "2" ? 2 : 0;
        if (!reg->mode && !mode.empty() && mode != "0") {
            fprintf(stderr, "sched-prof: off, because GGML_SCHED_PROF is '%s' and not 1 or 2\n", mode.c_str());
        }
        reg->file = GGML_SCHED_PROF_FILE ? GGML_SCHED_PROF_FILE : "";
        if (reg->mode) {
            atexit(prof_at_exit);
#ifndef _WIN32
            if (prof_signal_handler_is(SIG_DFL)) {
                prof_set_signal_handler(prof_on_signal);
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
    if (!reg.mode) {
        return nullptr;
    }
    auto * prof = new ggml_sched_prof;
    prof->serial = reg.mode == 2;
    std::lock_guard<std::mutex> lock(reg.mutex);
    prof->id             = reg.n_made++;
    prof->signal_printed = g_prof_signal.load();
    reg.alive.push_back(prof);
    return prof;
}

// wait until the backend has computed or received the tensor
static void prof_wait(ggml_backend_t backend, const ggml_tensor * tensor) {
    ggml_backend_synchronize(backend);

    // the RPC backend's synchronize waits until all is sent, not until it is done; only an answer proves that
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    if (dev && strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") == 0 && tensor && ggml_nbytes(tensor) > 0) {
        uint8_t byte;
        ggml_backend_tensor_get(tensor, &byte, 0, 1);
    }
}

void ggml_sched_prof_do_begin(ggml_sched_prof * prof, const ggml_backend_t * backends, int n_backends) {
    for (int i = 0; prof->serial && i < n_backends; i++) {
        ggml_backend_synchronize(backends[i]);
    }
    prof->parts.clear();
    prof->bytes   = 0;
    prof->t_begin = ggml_sched_prof_now();
    prof->t_last  = prof->t_begin;
}

void ggml_sched_prof_do_bytes(ggml_sched_prof * prof, size_t bytes) {
    prof->bytes += bytes;
}

void ggml_sched_prof_do_input(ggml_sched_prof * prof, int split_id, ggml_backend_t src, ggml_backend_t dst,
        const ggml_tensor * input, const ggml_tensor * input_cpy, int64_t t_start) {
    if (prof->serial) {
        prof_wait(dst, input_cpy);
    }
    const int64_t  ns    = ggml_sched_prof_now() - t_start;
    const uint64_t bytes = prof->bytes > 0 ? prof->bytes : ggml_nbytes(input);
    prof->parts.push_back({ split_id, src, input, dst, nullptr, bytes, ns, t_start - prof->t_last });
    prof->bytes  = 0;
    prof->t_last = ggml_sched_prof_now();
}

void ggml_sched_prof_do_split(ggml_sched_prof * prof, int split_id, ggml_backend_t backend, ggml_cgraph * graph, int64_t t_start) {
    if (prof->serial) {
        prof_wait(backend, graph->n_nodes > 0 ? graph->nodes[graph->n_nodes - 1] : nullptr);
    }
    const int64_t ns = ggml_sched_prof_now() - t_start;
    prof->parts.push_back({ split_id, nullptr, nullptr, backend, graph, 0, ns, t_start - prof->t_last });
    prof->t_last = ggml_sched_prof_now();
}

// batch: the rows of the first node, in practice tokens; above 32 they are put together by powers of two, so that
// prompts of all lengths give a few rows only
static int64_t prof_batch(int64_t n) {
    int64_t b = n;
    if (n > 32) {
        for (b = 64; b < n; b *= 2) {}
    }
    return b;
}

static const char * prof_first(const ggml_cgraph * graph) {
    return graph->n_nodes > 0 ? graph->nodes[0]->name : "";
}

static const char * prof_last(const ggml_cgraph * graph) {
    return graph->n_nodes > 0 ? graph->nodes[graph->n_nodes - 1]->name : "";
}

static void prof_hash(uint64_t & hash, const char * text) {
    do {
        hash = (hash ^ (uint8_t) *text) * 0x100000001b3ULL;
    } while (*text++);
}

// the sums that this run belongs to
static prof_graph * prof_find_graph(ggml_sched_prof * prof, const std::vector<const prof_part *> & splits) {
    const uint64_t uid = splits[0]->graph->uid;
    if (uid != 0 && uid == prof->last_uid && splits.size() == prof->last_n_splits) {
        return prof->last_graph;
    }

    uint64_t hash    = 0xcbf29ce484222325ULL;
    int      n_nodes = 0;
    for (const prof_part * split : splits) {
        prof_hash(hash, ggml_backend_name(split->dst));
        prof_hash(hash, prof_first(split->graph));
        prof_hash(hash, prof_last (split->graph));
        hash = (hash ^ (uint64_t) split->graph->n_nodes) * 0x100000001b3ULL;
        n_nodes += split->graph->n_nodes;
    }
    const ggml_cgraph * first = splits[0]->graph;
    const int64_t       batch = first->n_nodes > 0 ? prof_batch(ggml_nrows(first->nodes[0])) : 0;
    const prof_key      key(hash, splits.size(), batch);

    if (prof->graphs.count(key) == 0 && prof->graphs.size() >= PROF_MAX_GRAPHS) {
        return nullptr;
    }
    prof_graph & graph = prof->graphs[key];
    if (graph.runs == 0) {
        graph.batch   = batch;
        graph.n_nodes = n_nodes;
        for (const prof_part * split : splits) {
            prof_split row;
            row.backend = ggml_backend_name(split->dst);
            row.first   = prof_first(split->graph);
            row.last    = prof_last (split->graph);
            row.n_nodes = split->graph->n_nodes;
            graph.splits.push_back(std::move(row));
        }
    }

    prof->last_uid      = uid;
    prof->last_n_splits = splits.size();
    prof->last_graph    = &graph;
    return &graph;
}

static void prof_add_input(prof_split & split, const prof_part & part) {
    prof_input * row = nullptr;
    for (prof_input & it : split.inputs) {
        if (it.name == part.input->name && it.src == ggml_backend_name(part.src)) {
            row = &it;
            break;
        }
    }
    if (!row) {
        split.inputs.emplace_back();
        row = &split.inputs.back();
        row->name = part.input->name;
        row->src  = ggml_backend_name(part.src);
    }
    row->runs  += 1;
    row->bytes += part.bytes;
    row->ns    += part.ns;
}

static void prof_print(ggml_sched_prof * prof);

void ggml_sched_prof_do_end(ggml_sched_prof * prof) {
    const int64_t ns = ggml_sched_prof_now() - prof->t_begin;

    std::vector<const prof_part *> splits;
    for (const prof_part & part : prof->parts) {
        if (part.graph) {
            GGML_ASSERT(part.split_id == (int) splits.size());
            splits.push_back(&part);
        }
    }
    if (splits.empty()) {
        return;
    }

    std::lock_guard<std::mutex> lock(prof_get_registry().mutex);

    prof->runs++;
    prof_graph * graph = prof_find_graph(prof, splits);
    if (graph) {
        graph->runs++;
        graph->ns += ns;
        for (const prof_part & part : prof->parts) {
            prof_split & split = graph->splits[part.split_id];
            split.ns_wait += part.ns_wait;
            if (part.graph) {
                split.ns += part.ns;
            } else {
                prof_add_input(split, part);
            }
        }
    } else {
        prof->runs_dropped++;
    }

    const int signal = g_prof_signal.load();
    if (signal != prof->signal_printed) {
        prof->signal_printed = signal;
        prof_print(prof);
    }
}

//
// printing
//

GGML_ATTRIBUTE_FORMAT(2, 3)
static void prof_append(std::string & text, const char * format, ...) {
    char buffer[512];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    text += buffer;
}

static double prof_ms(int64_t ns, uint64_t runs) {
    return runs ? ns / 1e6 / runs : 0.0;
}

static void prof_graph_table(std::string & text, const prof_graph & graph) {
    int64_t ns_split = 0;
    int64_t ns_input = 0;
    int64_t ns_wait  = 0;
    int     width    = 12;
    for (const prof_split & split : graph.splits) {
        width     = std::max(width, (int) split.backend.size());
        ns_split += split.ns;
        ns_wait  += split.ns_wait;
        for (const prof_input & in : split.inputs) {
            ns_input += in.ns;
        }
    }
    const uint64_t runs = graph.runs;
    prof_append(text, "graph: batch ");
    if (graph.batch > 32) {
        prof_append(text, "%" PRId64 "-", graph.batch/2 + 1);
    }
    prof_append(text, "%" PRId64 ", %zu splits, %d nodes, %" PRIu64 " runs, %.3f ms a run = %.3f splits + %.3f copies + %.3f waits + %.3f profiler\n",
            graph.batch, graph.splits.size(), graph.n_nodes, runs, prof_ms(graph.ns, runs), prof_ms(ns_split, runs),
            prof_ms(ns_input, runs), prof_ms(ns_wait, runs), prof_ms(graph.ns - ns_split - ns_input - ns_wait, runs));
    prof_append(text, "  %4s %-*s %6s %8s %10s %10s %12s %8s  %s\n", "#", width, "backend", "nodes", "runs", "ms/run", "wait/run", "bytes/run", "GB/s", "what");
    int n = 0;
    for (const prof_split & split : graph.splits) {
        for (const prof_input & in : split.inputs) {
            prof_append(text, "  %4d %-*s %6s %8" PRIu64 " %10.4f %10s %12.0f %8.2f  copy %s from %s\n", n, width, split.backend.c_str(), "-",
                    in.runs, prof_ms(in.ns, in.runs), "-", (double) in.bytes/in.runs, in.ns > 0 ? (double) in.bytes/in.ns : 0.0,
                    in.name.c_str(), in.src.c_str());
        }
        prof_append(text, "  %4d %-*s %6d %8" PRIu64 " %10.4f %10.4f %12s %8s  %s .. %s\n", n, width, split.backend.c_str(), split.n_nodes,
                runs, prof_ms(split.ns, runs), prof_ms(split.ns_wait, runs), "-", "-", split.first.c_str(), split.last.c_str());
        n++;
    }
}

static std::string prof_table(const ggml_sched_prof * prof, const std::vector<const prof_graph *> & graphs) {
    std::string text;
    prof_append(text, "\nsched-prof: scheduler %d, %s (GGML_SCHED_PROF=%d, process %d, %" PRIu64 " graphs)\n", prof->id, prof->serial ?
            "serial: device times, each copy and split is waited for, overlap is lost" :
            "host times: launches and waits, asynchronous work counts where the host next waits for it",
            prof->serial ? 2 : 1, (int) getpid(), prof->runs);
    uint64_t runs_rest = prof->runs_dropped;
    for (size_t i = 0; i < graphs.size(); i++) {
        if (i < PROF_MAX_PRINTED) {
            prof_graph_table(text, *graphs[i]);
        } else {
            runs_rest += graphs[i]->runs;
        }
    }
    if (runs_rest > 0) {
        prof_append(text, "and %" PRIu64 " runs of other graphs\n", runs_rest);
    }
    return text;
}

static std::string prof_quote(const std::string & name) {
    std::string text = "\"";
    for (unsigned char c : name) {
        if (c == '"' || c == '\\') {
            text += '\\';
        }
        text += c < 0x20 ? ' ' : (char) c;
    }
    return text + "\"";
}

static std::string prof_jsonl(const ggml_sched_prof * prof, const std::vector<const prof_graph *> & graphs) {
    std::string text;
    for (const prof_graph * graph : graphs) {
        prof_append(text, "{\"pid\":%d,\"scheduler\":%d,\"print\":%d,\"serial\":%s,\"batch\":%" PRId64 ",\"n_splits\":%zu,\"n_nodes\":%d,\"runs\":%" PRIu64
                ",\"ns\":%" PRId64 ",\"splits\":[", (int) getpid(), prof->id, prof->n_prints, prof->serial ? "true" : "false", graph->batch,
                graph->splits.size(), graph->n_nodes, graph->runs, graph->ns);
        const char * sep = "";
        for (const prof_split & split : graph->splits) {
            prof_append(text, "%s{\"backend\":%s,", sep, prof_quote(split.backend).c_str());
            prof_append(text, "\"first\":%s,", prof_quote(split.first).c_str());
            prof_append(text, "\"last\":%s,", prof_quote(split.last).c_str());
            prof_append(text, "\"nodes\":%d,\"runs\":%" PRIu64 ",\"ns\":%" PRId64 ",\"wait_ns\":%" PRId64 ",\"inputs\":[",
                    split.n_nodes, graph->runs, split.ns, split.ns_wait);
            const char * sep_in = "";
            for (const prof_input & in : split.inputs) {
                prof_append(text, "%s{\"src\":%s,", sep_in, prof_quote(in.src).c_str());
                prof_append(text, "\"name\":%s,\"runs\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"ns\":%" PRId64 "}",
                        prof_quote(in.name).c_str(), in.runs, in.bytes, in.ns);
                sep_in = ",";
            }
            text += "]}";
            sep = ",";
        }
        text += "]}\n";
    }
    return text;
}

// the registry is locked
static void prof_print(ggml_sched_prof * prof) {
    if (prof->runs == 0) {
        return;
    }
    prof->runs_printed = prof->runs;

    std::vector<const prof_graph *> graphs;
    for (const auto & it : prof->graphs) {
        graphs.push_back(&it.second);
    }
    std::sort(graphs.begin(), graphs.end(), [](const prof_graph * a, const prof_graph * b) { return a->ns > b->ns; });

    // in one piece: several processes may append to the same file
    const std::string & file = prof_get_registry().file;
    const bool jsonl = file.size() > 6 && file.compare(file.size() - 6, 6, ".jsonl") == 0;
    const std::string text = jsonl ? prof_jsonl(prof, graphs) : prof_table(prof, graphs);
    prof->n_prints++;

    FILE * out = file.empty() ? stderr : fopen(file.c_str(), "a");
    if (!out) {
        fprintf(stderr, "sched-prof: cannot open %s\n", file.c_str());
        return;
    }
    fwrite(text.data(), 1, text.size(), out);
    if (out == stderr) {
        fflush(out);
    } else {
        fclose(out);
    }
}

static void prof_at_exit() {
#ifndef _WIN32
    // this code may be about to be unloaded
    if (prof_signal_handler_is(prof_on_signal)) {
        prof_set_signal_handler(SIG_IGN);
    }
#endif
    // exit may be called in a signal handler of a thread that holds the lock: rather print nothing than hang
    prof_registry & reg = prof_get_registry();
    if (!reg.mutex.try_lock()) {
        return;
    }
    for (ggml_sched_prof * prof : reg.alive) {
        if (prof->runs != prof->runs_printed) {
            prof_print(prof);
        }
    }
    reg.mutex.unlock();
}

void ggml_sched_prof_free(ggml_sched_prof * prof) {
    if (!prof) {
        return;
    }
    prof_registry & reg = prof_get_registry();
    std::lock_guard<std::mutex> lock(reg.mutex);
    if (prof->runs != prof->runs_printed) {
        prof_print(prof);
    }
    reg.alive.erase(std::find(reg.alive.begin(), reg.alive.end(), prof));
    delete prof;
}
