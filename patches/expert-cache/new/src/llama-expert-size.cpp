// SPDX-License-Identifier: MIT

// How many slots, and their memory.

#include "llama-expert-cache-impl.h"

#include "llama-impl.h"

#include <algorithm>

static constexpr double MIB = 1024.0*1024.0;

// Memory of a layer's banks and its other tensors with n slots.
static uint64_t layer_bytes(const llama_expert_layer & l, int32_t n_slots) {
    uint64_t n = l.bytes_slot()*(n_slots + !l.skip);
    for (const ggml_tensor * t : l.extras) {
        n += ggml_nbytes(t);
    }
    return n;
}

void llama_expert_cache::drop(device & d, llama_expert_layer * l, const std::string & why) {
    refuse(l->il, why);
    by_down.erase(l->weights.back());
    d.layers.erase(std::find(d.layers.begin(), d.layers.end(), l));
    layers.erase(std::find_if(layers.begin(), layers.end(), [&](const auto & have) { return have.get() == l; }));
}

bool llama_expert_cache::alloc_layer(llama_expert_layer & l, device & d, int32_t n_slots) {
    l.twins.clear();
    l.buf.reset();
    l.ctx.reset();
    if (set->fault_alloc >= 0 && set->n_allocs++ >= set->fault_alloc && set->n_allocs <= set->fault_alloc + set->fault_allocs) {
        return false;
    }
    const ggml_init_params params = { (l.weights.size() + l.extras.size())*ggml_tensor_overhead(), nullptr, true };
    l.ctx.reset(ggml_init(params));
    for (ggml_tensor * w : l.weights) {
        ggml_tensor * bank = ggml_new_tensor_3d(l.ctx.get(), w->type, w->ne[0], w->ne[1], n_slots + !l.skip);
        ggml_format_name(bank, "%s.slots", w->name);
        l.twins[w] = bank;
    }
    for (ggml_tensor * t : l.extras) {
        ggml_tensor * copy = ggml_dup_tensor(l.ctx.get(), t);
        ggml_format_name(copy, "%s.copy", t->name);
        l.twins[t] = copy;
    }
    l.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(l.ctx.get(), ggml_backend_dev_buffer_type(d.dev)));
    if (!l.buf) {
        l.twins.clear();
        l.ctx.reset();
        return false;
    }
    // all of it: a slot of zeros gives zeros, and kernels may read a little beyond an expert
    ggml_backend_buffer_clear(l.buf.get(), 0);
    ggml_backend_buffer_set_usage(l.buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (ggml_tensor * t : l.extras) {
        std::vector<uint8_t> bytes(ggml_nbytes(t));
        ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
        ggml_backend_tensor_set(l.twins[t], bytes.data(), 0, bytes.size());
    }
    l.n_slots = n_slots;
    by_down[l.weights.back()] = &l;
    return true;
}

bool llama_expert_cache::alloc_table(device & d) {
    int64_t n = 0;
    for (const llama_expert_layer * l : d.layers) {
        n += l->n_expert;
    }
    const ggml_init_params params = { (1 + d.layers.size())*ggml_tensor_overhead(), nullptr, true };
    d.buf.reset();
    d.ctx.reset(ggml_init(params));
    d.table = ggml_new_tensor_2d(d.ctx.get(), GGML_TYPE_I32, 1, n);
    ggml_format_name(d.table, "expert_table_%s", ggml_backend_dev_name(d.dev));
    int64_t at = 0;
    for (llama_expert_layer * l : d.layers) {
        l->table_dev = ggml_view_2d(d.ctx.get(), d.table, 1, l->n_expert, d.table->nb[1], at*d.table->nb[1]);
        l->table_at  = at;
        at += l->n_expert;
    }
    d.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(d.ctx.get(), ggml_backend_dev_buffer_type(d.dev)));
    if (!d.buf) {
        return false;
    }
    ggml_backend_buffer_set_usage(d.buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    d.values.resize(n);
    for (llama_expert_layer * l : d.layers) {
        std::fill(l->table.begin(), l->table.end(), -1);
        std::fill_n(d.values.begin() + l->table_at, l->n_expert, l->skip ? -1 : l->n_slots);
    }
    ggml_backend_tensor_set(d.table, d.values.data(), 0, ggml_nbytes(d.table));
    return true;
}

// Each layer as many, but no more than it has experts.
bool llama_expert_cache::alloc_device(device & d, int32_t n_slots) {
    for (llama_expert_layer * l : d.layers) {
        if (!alloc_layer(*l, d, std::min(n_slots, l->n_expert))) {
            d.failed_at = l;
            return false;
        }
    }
    return alloc_table(d);
}

void llama_expert_cache::free_device(device & d) {
    for (llama_expert_layer * l : d.layers) {
        by_down.erase(l->weights.back());
        l->twins.clear();
        l->buf.reset();
        l->ctx.reset();
    }
    d.buf.reset();
    d.ctx.reset();
}

int32_t llama_expert_cache::slots_in(const device & d, uint64_t bytes) const {
    const uint64_t max_size = ggml_backend_buft_get_max_size(ggml_backend_dev_buffer_type(d.dev));
    int32_t most = 0;
    for (const llama_expert_layer * l : d.layers) {
        uint64_t per_layer = l->n_expert;
        for (const ggml_tensor * w : l->weights) {
            const uint64_t n = max_size/w->nb[2];
            per_layer = std::min<uint64_t>(per_layer, n > 0 ? n - !l->skip : 0);
        }
        most = std::max(most, (int32_t) per_layer);
    }
    int32_t lo = 0, hi = params.n_slots < 0 ? most : std::min(most, params.n_slots);
    while (lo < hi) {
        const int32_t n = (lo + hi + 1)/2;
        uint64_t need = 0;
        for (const llama_expert_layer * l : d.layers) {
            need += layer_bytes(*l, std::min(n, l->n_expert));
        }
        (need <= bytes ? lo : hi) = need <= bytes ? n : n - 1;
    }
    return lo;
}

// Fewer slots, then fewer layers, until it fits and the margin is left.
void llama_expert_cache::size_device(device & d) {
    free_device(d);
    size_t total = 0;
    ggml_backend_dev_memory(d.dev, &d.free, &total);
    uint64_t room = d.free > set->margin ? d.free - set->margin : 0;
    for (int attempt = 0; !d.layers.empty(); attempt++) {
        const int32_t n = slots_in(d, room);
        llama_expert_layer * worst = *std::max_element(d.layers.begin(), d.layers.end(), [](const auto * a, const auto * b) {
            return std::min(a->n_used + 1, a->n_expert) < std::min(b->n_used + 1, b->n_expert);
        });
        const int32_t least = std::min(worst->n_used + 1, worst->n_expert);
        if (n < least) {
            // a smaller number of layers with enough slots is better than none
            drop(d, params.n_slots >= 0 && params.n_slots < least ? worst : d.layers.back(), params.n_slots >= 0 && params.n_slots < least ?
                format("%d slots are fewer than the experts of a token and one (%d)", params.n_slots, least) :
                format("%s has no room for %d slots beside its margin", ggml_backend_dev_name(d.dev), least));
            continue;
        }
        d.failed_at = nullptr;
        size_t free_now = 0;
        const bool ok = alloc_device(d, n);
        ggml_backend_dev_memory(d.dev, &free_now, &total);
        if (ok && free_now >= set->margin) {
            d.n_slots = n;
            if (params.n_slots > 0 && n < params.n_slots && n < worst->n_expert) {
                LLAMA_LOG_WARN("expert cache: %s: %d slots of %d asked for, more do not fit beside a margin of %.0f MiB\n",
                    ggml_backend_dev_name(d.dev), n, params.n_slots, set->margin/MIB);
            }
            return;
        }
        llama_expert_layer * failed = d.failed_at;
        free_device(d);
        if (!ok && failed && attempt >= 4) {
            drop(d, failed, format("%s gave no memory for it", ggml_backend_dev_name(d.dev)));
        } else {
            room -= std::min<uint64_t>(room, std::max<uint64_t>(room/16 + 1, ok ? set->margin - free_now : 0));
        }
    }
}

bool llama_expert_cache::allocate() {
    for (auto & d : devices) {
        size_device(*d);
    }
    devices.erase(std::remove_if(devices.begin(), devices.end(), [](const auto & d) { return d->layers.empty(); }), devices.end());
    if (layers.empty()) {
        turn_off(reasons());
        return false;
    }
    for (auto & d : devices) {
        std::vector<llama_expert_policy::layer> list;
        for (llama_expert_layer * l : d->layers) {
            l->i_layer = (int32_t) list.size();
            list.push_back({ l->n_expert, l->n_slots, l->bytes_slot() });
        }
        d->policy = std::make_unique<llama_expert_policy>(set->policy, list);
        try {
            d->up = std::make_unique<llama_expert_uploader>(d->dev, set->fault_upload, set->fault_lie);
        } catch (const std::exception & e) {
            turn_off(e.what());
            return false;
        }
    }
    return true;
}
