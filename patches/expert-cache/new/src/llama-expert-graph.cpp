// SPDX-License-Identifier: MIT

// The two branches of a cached layer.
//
//   device: router, ids ─┬─ table ─ slots ─ up, gate, act, down ─┬─ sum
//   host:                └─ misses ──────── up, gate, act, down ─┘
//
// A row of either is zero where the other has the expert, and x + 0 is exact: the sum is what one branch would give.

#include "llama-expert-cache.h"

#include "ggml-sched-overlap.h"

#include <algorithm>
#include <cstring>

ggml_tensor * llama_expert_branch::twin(ggml_tensor * t) const {
    return device && t ? device->twins.at(t) : t;
}

// ids of the misses, -1 for the others; the host sees all ids here, so this is also where use is counted
static void expert_misses(ggml_tensor * dst, int ith, int nth, void * userdata) {
    if (ith != 0) { // all threads of the graph come here
        return;
    }
    GGML_UNUSED(nth);
    const auto * l = (const llama_expert_layer *) userdata;
    const ggml_tensor * src = dst->src[0];
    GGML_ASSERT(ggml_is_contiguous(src) && ggml_is_contiguous(dst) && src->ne[0] == l->n_used);

    const int32_t * ids = (const int32_t *) src->data;
    int32_t *       out = (int32_t *) dst->data;
    const int64_t n = ggml_nelements(dst);
    uint64_t hits = 0;
    for (int64_t i = 0; i < n; i++) {
        const bool hit = l->table[ids[i]] >= 0;
        out[i] = hit ? -1 : ids[i];
        hits += hit;
    }
    l->hits.fetch_add(hits, std::memory_order_relaxed);
    l->misses.fetch_add(n - hits, std::memory_order_relaxed);
    l->n_seen = (int32_t) src->ne[1];
    memcpy(l->seen.data(), ids, n*sizeof(int32_t));
}

ggml_tensor * llama_expert_layer::build(ggml_context * ctx0, ggml_cgraph * gf, ggml_backend_sched_t sched, ggml_tensor * cur,
                                        ggml_tensor * ids, const ffn & experts) const {
    const int64_t n_tokens = ids->ne[1];
    GGML_ASSERT(ids->ne[0] == n_used && n_tokens <= limit);

    // what both branches need is in front of the mark: the host gets it before the device is busy
    ids = ggml_cont(ctx0, ids);
    ggml_build_forward_expand(gf, cur);
    ggml_build_forward_expand(gf, ids);

    ggml_tensor * slots = ggml_get_rows(ctx0, table_dev, ggml_reshape_1d(ctx0, ids, n_used*n_tokens));
    ggml_format_name(slots, "ffn_moe_slots-%d", il);
    ggml_backend_sched_mark_overlap(sched, slots);
    const llama_expert_branch on_device = { ggml_reshape_2d(ctx0, slots, n_used, n_tokens), skip, this };
    ggml_tensor * hit = experts(cur, ids, &on_device);
    ggml_build_forward_expand(gf, hit);

    ggml_tensor * misses = ggml_custom_4d(ctx0, GGML_TYPE_I32, n_used, n_tokens, 1, 1, &ids, 1, expert_misses, 1, const_cast<llama_expert_layer *>(this));
    ggml_format_name(misses, "ffn_moe_misses-%d", il);
    ggml_backend_sched_set_tensor_backend(sched, misses, backend_cpu);
    const llama_expert_branch on_host = { misses, true, nullptr };
    ggml_tensor * miss = experts(cur, ids, &on_host);
    ggml_build_forward_expand(gf, miss);

    ggml_tensor * sum = ggml_add(ctx0, hit, miss);
    ggml_format_name(sum, "ffn_moe_hits_misses-%d", il);
    ggml_backend_sched_set_tensor_backend(sched, sum, backend);
    return sum;
}
