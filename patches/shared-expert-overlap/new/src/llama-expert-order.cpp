// SPDX-License-Identifier: MIT

#include "llama-expert-order.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_set>
#include <vector>

static bool is_misses(const ggml_tensor * node) {
    return node->op == GGML_OP_CUSTOM && strncmp(node->name, "ffn_moe_misses-", 15) == 0;
}

static bool is_sum(const ggml_tensor * node) {
    return node->op == GGML_OP_ADD && strncmp(node->name, "ffn_moe_hits_misses-", 20) == 0;
}

// A weight in a device's memory. All else that is no node (inputs, the KV cache) would bring a wait or an order with it.
static bool is_weight(const ggml_tensor * t) {
    const ggml_tensor * owner = t->view_src ? t->view_src : t;
    return owner->buffer && ggml_backend_buffer_get_usage(owner->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
        !ggml_backend_buffer_is_host(owner->buffer);
}

// It may overwrite what the nodes that it would pass still read.
static bool in_place(const ggml_tensor * node) {
    return node->view_src && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE && node->op != GGML_OP_PERMUTE &&
        node->op != GGML_OP_TRANSPOSE;
}

int llama_expert_order(ggml_cgraph * gf) {
    const char * text = std::getenv("LLAMA_MOE_CACHE_SHARED");
    if (text && !strcmp(text, "0")) {
        return 0;
    }
    ggml_tensor ** nodes = ggml_graph_nodes(gf);
    const int n_nodes = ggml_graph_n_nodes(gf);
    std::unordered_set<const ggml_tensor *> before; // computed when the device's branch begins, or moved there
    std::vector<ggml_tensor *> moved, rest;
    int n_moved = 0;
    for (int i = 0; i < n_nodes; i++) {
        if (!is_misses(nodes[i])) {
            before.insert(nodes[i]);
            continue;
        }
        // the misses up to the sum, then what may move up to the next layer's misses
        int i_sum = i;
        while (i_sum < n_nodes && !is_sum(nodes[i_sum])) {
            i_sum++;
        }
        int end = i_sum;
        while (end < n_nodes && !is_misses(nodes[end])) {
            end++;
        }
        moved.clear();
        rest.assign(nodes + i, nodes + i_sum);
        for (int j = i_sum; j < end; j++) {
            ggml_tensor * node = nodes[j];
            bool movable = !is_sum(node) && node->src[0] && !(node->flags & GGML_TENSOR_FLAG_INPUT) && !in_place(node);
            for (int k = 0; k < GGML_MAX_SRC && movable; k++) {
                movable = !node->src[k] || before.count(node->src[k]) || is_weight(node->src[k]);
            }
            if (movable) {
                before.insert(node);
                moved.push_back(node);
            } else {
                rest.push_back(node);
            }
        }
        std::copy(moved.begin(), moved.end(), nodes + i);
        std::copy(rest.begin(), rest.end(), nodes + i + moved.size());
        before.insert(rest.begin(), rest.end());
        n_moved += (int) moved.size();
        i = end - 1;
    }
    return n_moved;
}
