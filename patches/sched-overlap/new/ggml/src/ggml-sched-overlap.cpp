// SPDX-License-Identifier: MIT

#include "ggml-sched-overlap-impl.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

struct fetch {
    ggml_tensor  * input;
    ggml_tensor  * input_cpy;
    ggml_backend_t backend; // of the input
};

} // namespace

struct ggml_sched_overlap {
    bool enabled = true;
    bool inert   = false;

    std::unordered_set<const ggml_tensor *> marks;
    std::vector<int> marked;       // splits that begin with a mark, ascending
    int              fetched = -1; // the split whose inputs were fetched early, in the graph that runs
    std::vector<fetch> inputs;     // of that split
    int64_t          count = 0;

    int                         joined = -1; // the split behind the host's whose inputs were fetched early
    std::vector<ggml_backend_t> sending;     // may still read the host's memory
};

ggml_sched_overlap * ggml_sched_overlap_new(void) {
    ggml_sched_overlap * ov = new ggml_sched_overlap;
    const char * text = std::getenv("GGML_SCHED_OVERLAP");
    ov->enabled = !text || strcmp(text, "0") != 0;
    return ov;
}

void ggml_sched_overlap_free(ggml_sched_overlap * ov) {
    delete ov;
}


void ggml_sched_overlap_add(ggml_sched_overlap * ov, const ggml_tensor * node) {
    if (ov->enabled) {
        ov->marks.insert(node);
    }
}

int64_t ggml_sched_overlap_count(const ggml_sched_overlap * ov) {
    return ov->count;
}

void ggml_sched_overlap_begin(ggml_sched_overlap * ov, bool inert) {
    ov->inert = inert;
    ov->marked.clear();
}

bool ggml_sched_overlap_cut(ggml_sched_overlap * ov, const ggml_tensor * node, int split_id) {
    if (ov->marks.empty() || ov->inert || ov->marks.find(node) == ov->marks.end()) {
        return false;
    }
    ov->marked.push_back(split_id);
    return true;
}

bool ggml_sched_overlap_wants(const ggml_sched_overlap * ov, int split_id) {
    return std::binary_search(ov->marked.begin(), ov->marked.end(), split_id);
}

static bool is_cpu(ggml_backend_t backend) {
    return ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

static const ggml_tensor * owner(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// a view writes nothing, an operation in place does
static bool writes(const ggml_tensor * node) {
    return node->op != GGML_OP_NONE && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE &&
           node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE;
}

static bool produces(const ggml_cgraph * graph, const ggml_tensor * t) {
    return std::any_of(graph->nodes, graph->nodes + graph->n_nodes, [&](const ggml_tensor * node) {
        return writes(node) && owner(node) == owner(t);
    });
}

void ggml_sched_overlap_input(ggml_sched_overlap * ov, ggml_tensor * input, ggml_tensor * input_cpy, ggml_backend_t backend) {
    ov->inputs.push_back({ input, input_cpy, backend });
}

void ggml_sched_overlap_fetch(ggml_sched_overlap * ov, ggml_sched_prof * prof, const ggml_cgraph * graph, int next_id,
                              ggml_backend_t next_backend) {
    const std::vector<fetch> inputs = std::move(ov->inputs);
    ov->inputs.clear();
    const auto ready = [&](const fetch & in) {
        return !produces(graph, in.input) && ggml_backend_buffer_is_host(in.input_cpy->buffer);
    };
    if (inputs.empty() || !is_cpu(next_backend) || !std::all_of(inputs.begin(), inputs.end(), ready)) {
        return;
    }
    // what is fetched may lie where a result was that is still being sent; behind each other in one queue they are in order
    for (ggml_backend_t backend : ov->sending) {
        if (!std::all_of(inputs.begin(), inputs.end(), [&](const fetch & in) { return in.backend == backend; })) {
            ggml_backend_synchronize(backend);
        }
    }
    ov->sending.clear();
    ggml_backend_synchronize(next_backend); // it may still read the copies
    for (size_t i = 0; i < inputs.size(); i++) {
        const fetch & in = inputs[i];
        const int64_t t_start = ggml_sched_prof_start(prof);
        if (ggml_backend_buffer_is_host(in.input->buffer)) {
            ggml_backend_synchronize(in.backend);
            ggml_backend_tensor_copy(in.input, in.input_cpy);
        } else {
            ggml_backend_tensor_get_async(in.backend, in.input, in.input_cpy->data, 0, ggml_nbytes(in.input));
        }
        // one wait for all that come from one device
        if (i + 1 == inputs.size() || inputs[i + 1].backend != in.backend) {
            ggml_backend_synchronize(in.backend);
        }
        ggml_sched_prof_input(prof, next_id, in.backend, next_backend, in.input, in.input_cpy, t_start);
    }
    ov->fetched = next_id;
    ov->count++;
}

static void settle(ggml_sched_overlap * ov) {
    for (ggml_backend_t backend : ov->sending) {
        ggml_backend_synchronize(backend);
    }
    ov->sending.clear();
}

void ggml_sched_overlap_reset(ggml_sched_overlap * ov) {
    settle(ov); // the inputs of another graph may be written next
    ov->marks.clear();
}

bool ggml_sched_overlap_take(ggml_sched_overlap * ov, int split_id, ggml_backend_t backend) {
    const bool there = ov->fetched == split_id;
    if (there || split_id == 0) { // a graph that failed half way may have left one
        ov->fetched = -1;
        ov->joined  = there ? split_id + 1 : -1;
    }
    if (!there && !ov->sending.empty() && is_cpu(backend)) {
        settle(ov);
    }
    return there;
}

bool ggml_sched_overlap_send(ggml_sched_overlap * ov, int split_id, ggml_backend_t input_backend, ggml_backend_t backend,
                             const ggml_tensor * input, ggml_tensor * input_cpy) {
    if (ov->joined != split_id || !is_cpu(input_backend) || !backend->iface.set_tensor_async ||
        !ggml_backend_buffer_is_host(input->buffer) || ggml_backend_buffer_get_usage(input->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
        return false;
    }
    ggml_backend_synchronize(input_backend);
    ggml_backend_tensor_set_async(backend, input_cpy, input->data, 0, ggml_nbytes(input));
    if (std::find(ov->sending.begin(), ov->sending.end(), backend) == ov->sending.end()) {
        ov->sending.push_back(backend);
    }
    return true;
}

void ggml_sched_overlap_launched(const ggml_sched_overlap * ov, int split_id, ggml_backend_t backend) {
    if (!ggml_sched_overlap_wants(ov, split_id)) {
        return;
    }
    // for backends that launch from a thread of their own, which would compete with the host's for a core
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto flush = (void (*)(ggml_backend_t)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_flush");
    if (flush) {
        flush(backend);
    }
}
