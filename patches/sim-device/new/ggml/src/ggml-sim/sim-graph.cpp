// SPDX-License-Identifier: MIT

#include "sim-graph.h"

static bool computes_nothing(const ggml_tensor * t) {
    return ggml_is_empty(t) || t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW ||
           t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

sim_graph::sim_graph(const ggml_cgraph * src, sim_device * dev) : dev(dev) {
    graph.order            = src->order;
    graph.n_nodes          = src->n_nodes;
    graph.visited_hash_set = ggml_hash_set_new(2*src->n_nodes + 1);
    use_counts.resize(graph.visited_hash_set.size);
    nodes.reserve(src->n_nodes);

    for (int i = 0; i < src->n_nodes; i++) {
        ggml_tensor * node = copy_of(src->nodes[i]);
        // views of host tensors may stand in a device's split, but nothing reads them there
        const bool computes = !computes_nothing(src->nodes[i]);
        if (computes) {
            require_here(src->nodes[i]);
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * from = src->nodes[i]->src[j];
            if (computes && from) {
                require_here(from);
            }
            node->src[j] = from ? copy_of(from) : nullptr;
        }
        if (node->op == GGML_OP_MUL_MAT_ID) {
            experts.push_back(i);
        }
        nodes.push_back(node);
        // fusion asks how often a node is used
        const size_t pos = ggml_hash_insert(&graph.visited_hash_set, node);
        GGML_ASSERT(pos != GGML_HASHSET_ALREADY_EXISTS);
        use_counts[pos] = ggml_node_get_use_count(src, i);
    }
    graph.nodes      = nodes.data();
    graph.use_counts = use_counts.data();
    copies.clear();
}

sim_graph::~sim_graph() {
    ggml_hash_set_free(&graph.visited_hash_set);
}

ggml_tensor * sim_graph::copy_of(const ggml_tensor * t) {
    const auto found = copies.find(t);
    if (found != copies.end()) {
        return found->second;
    }
    tensors.push_back(*t);
    ggml_tensor * copy = &tensors.back();
    copies[t] = copy;

    for (auto & src : copy->src) {
        src = nullptr; // set for nodes only
    }
    copy->view_src = t->view_src ? copy_of(t->view_src) : nullptr;

    ggml_backend_buffer_t buffer = sim_buffer_of(t);
    if (t->data != nullptr && sim_buffer_is_sim(buffer)) {
        copy->data = sim_real(buffer, t->data);
    }
    return copy;
}

void sim_graph::require_here(const ggml_tensor * t) const {
    if (t->data == nullptr) {
        return;
    }
    ggml_backend_buffer_t buffer = sim_buffer_of(t);
    if (!sim_buffer_is_sim(buffer)) {
        GGML_ABORT("sim: %s uses %s, which lies in host memory (%s)", dev->name.c_str(), sim_name_of(t),
            buffer ? ggml_backend_buffer_name(buffer) : "no buffer");
    }
    if (sim_buffer_device(buffer) != dev) {
        GGML_ABORT("sim: %s uses %s, which lies on %s", dev->name.c_str(), sim_name_of(t), ggml_backend_buffer_name(buffer));
    }
}

// the experts that a MUL_MAT_ID reads, known only once its ids have been computed
static std::vector<sim_access> expert_accesses(const ggml_tensor * node) {
    const ggml_tensor * weights = node->src[0];
    const ggml_tensor * ids     = node->src[2];
    std::vector<bool> used(weights->ne[2]);
    std::vector<sim_access> out;
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 0; i0 < ids->ne[0]; i0++) {
            const int32_t id = *(const int32_t *) ((const char *) ids->data + i1*ids->nb[1] + i0*ids->nb[0]);
            if (id < 0 || id >= weights->ne[2] || used[id]) {
                continue;
            }
            used[id] = true;
            out.push_back({ (const uint8_t *) weights->data + id*weights->nb[2], weights->nb[2], false,
                std::string(sim_name_of(weights)) + " expert " + std::to_string(id) });
        }
    }
    return out;
}

std::vector<sim_access> sim_graph::banks() const {
    std::vector<sim_access> out;
    for (int i : experts) {
        const ggml_tensor * bank = nodes[i]->src[0];
        out.push_back({ (const uint8_t *) bank->data, ggml_nbytes(bank), false, sim_name_of(bank) });
    }
    return out;
}

ggml_status sim_graph::compute(ggml_backend_t cpu, int stream, uint64_t handle) {
    if (!sim_get_config().check || experts.empty()) {
        return ggml_backend_graph_compute(cpu, &graph);
    }
    // stop before each MUL_MAT_ID, where its ids are there and not yet overwritten
    ggml_status status = GGML_STATUS_SUCCESS;
    int from = 0;
    for (size_t i = 0; i <= experts.size() && status == GGML_STATUS_SUCCESS; i++) {
        const int to = i < experts.size() ? experts[i] : graph.n_nodes;
        if (to > from) {
            ggml_cgraph part = ggml_graph_view(&graph, from, to);
            status = ggml_backend_graph_compute(cpu, &part);
        }
        if (i < experts.size()) {
            sim_check_late(stream, handle, "a graph", expert_accesses(nodes[to]));
        }
        from = to;
    }
    sim_check_ran(stream, handle);
    return status;
}

std::vector<sim_access> sim_graph_accesses(const ggml_cgraph * graph, bool with_experts) {
    std::vector<sim_access> out;
    const auto add = [&](const ggml_tensor * t, bool write) {
        if (t->data != nullptr && ggml_nbytes(t) > 0) {
            out.push_back({ (const uint8_t *) t->data, ggml_nbytes(t), write, sim_name_of(t) });
        }
    };
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (computes_nothing(node)) {
            continue;
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            if (node->src[j] && (j != 0 || with_experts || node->op != GGML_OP_MUL_MAT_ID)) {
                add(node->src[j], false);
            }
        }
        add(node, true);
    }
    return out;
}
