// SPDX-License-Identifier: MIT

// Life of the cache: which layers, how many slots, and what happens at the idle point.

#include "llama-expert-cache-impl.h"

#include "llama-adapter.h"
#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cinttypes>
#include <cstdlib>
#include <cstring>

static constexpr double MIB = 1024.0*1024.0;

uint64_t llama_expert_layer::bytes_slot() const {
    uint64_t n = 0;
    for (const ggml_tensor * w : weights) {
        n += w->nb[2];
    }
    return n;
}

llama_expert_cache::llama_expert_cache(const llama_model & model, const llama_cparams & cparams,
        const llama_expert_cache_params & params, const std::vector<ggml_backend_t> & backends) :
    model(model), cparams(cparams), params(params), backends(backends), set(new settings) {
}

llama_expert_cache::~llama_expert_cache() {
    for (auto & d : devices) {
        d->up.reset(); // nothing writes any more
    }
    if (set->stats && !layers.empty()) {
        log_stats();
    }
}

void llama_expert_cache::turn_off(const std::string & why) {
    active = false;
    reason = why;
    LLAMA_LOG_WARN("expert cache: off: %s\n", why.c_str());
    for (auto & d : devices) {
        d->up.reset();
    }
    by_down.clear();
    devices.clear();
    layers.clear();
}

//
// which layers
//

static bool device_takes(ggml_backend_dev_t dev, ggml_tensor * w, bool skip) {
    const ggml_init_params params = { 16*ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor * as  = ggml_new_tensor_3d(ctx.get(), w->type, w->ne[0], w->ne[1], 4);
    ggml_tensor * b   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w->ne[0], 1, 1);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 2, 1);
    ggml_tensor * mm  = ggml_mul_mat_id(ctx.get(), as, b, ids);
    if (skip) {
        ggml_mul_mat_id_set_skip(mm);
    }
    // and reads slots from a table
    ggml_tensor * rows = ggml_get_rows(ctx.get(), ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 4), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 2));
    return ggml_backend_dev_supports_op(dev, mm) && ggml_backend_dev_supports_op(dev, rows);
}

// Tokens up to which CUDA and HIP multiply with their mat-vec kernel whatever the GPU (the least of all their tables):
// other kernels lose rows when an id, here that of the slot of zeros, comes twice in a token.
static int32_t mat_vec_tokens(ggml_backend_dev_t dev, ggml_type type) {
    const std::string reg = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
    if (reg == "RPC" || reg == "SIM") {
        return 8; // a remote GPU takes what it would from any client
    }
    return ggml_is_quantized(type) ? 4 : 0;
}

// Some backends bring weights into a layout of their own, when they are set or when they are first used: a slot's bytes
// would be the source's no more.
static bool keeps_bytes(ggml_backend_dev_t dev) {
    const std::string reg = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
    for (const char * known : { "CUDA", "ROCm", "MUSA", "Vulkan", "RPC", "SIM" }) {
        if (reg == known) {
            return true;
        }
    }
    return false;
}

bool llama_expert_cache::add_layer(int32_t il, std::string & why) {
    const llama_layer & layer = model.layers[il];
    auto l = std::make_unique<llama_expert_layer>();
    l->il     = il;
    l->n_used = (int32_t) model.hparams.n_expert_used(il);
    l->limit  = set->limit;

    for (ggml_tensor * w : { layer.ffn_up_exps, layer.ffn_gate_exps, layer.ffn_gate_up_exps, layer.ffn_down_exps }) {
        if (w) {
            l->weights.push_back(w);
        }
    }
    for (ggml_tensor * t : { layer.ffn_up_exps_s, layer.ffn_gate_exps_s, layer.ffn_down_exps_s, layer.ffn_up_exps_b,
                             layer.ffn_gate_exps_b, layer.ffn_gate_up_exps_b, layer.ffn_down_exps_b }) {
        if (t) {
            l->extras.push_back(t);
        }
    }
    l->n_expert = (int32_t) layer.ffn_down_exps->ne[2];

    ggml_backend_dev_t dev = model.dev_layer(il);
    const auto type = dev ? ggml_backend_dev_type(dev) : GGML_BACKEND_DEVICE_TYPE_CPU;
    if (type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        why = "the layer is not on a device";
        return false;
    }
    if (type == GGML_BACKEND_DEVICE_TYPE_META) {
        why = "its tensors are split over devices (-sm tensor)";
        return false;
    }
    if (type != GGML_BACKEND_DEVICE_TYPE_GPU || ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(dev))) {
        why = "the device's memory is the host's";
        return false;
    }
    if (!keeps_bytes(dev)) {
        why = std::string(ggml_backend_dev_name(dev)) + " may keep weights in a layout of its own";
        return false;
    }
    for (const ggml_tensor * w : l->weights) {
        if (ggml_backend_buffer_is_host(w->buffer)) {
            continue;
        }
        ggml_backend_dev_t owner = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(w->buffer));
        const bool cpu = !owner || ggml_backend_dev_type(owner) == GGML_BACKEND_DEVICE_TYPE_CPU;
        why = cpu ? "its experts are repacked for the CPU (--no-repack keeps them as they are)" : "its experts are on a device";
        return false;
    }
    for (ggml_tensor * w : l->weights) {
        l->skip = l->skip && device_takes(dev, w, true);
    }
    for (ggml_tensor * w : l->weights) {
        if (!device_takes(dev, w, false)) {
            why = std::string("the device cannot multiply ") + ggml_type_name(w->type) + " experts";
            return false;
        }
        if (!l->skip) {
            l->limit = std::min(l->limit, mat_vec_tokens(dev, w->type));
        }
    }
    if (l->limit < 1) {
        why = "the device does not know ids of -1, and has no other way for experts that are not quantized";
        return false;
    }

    device * d = nullptr;
    for (auto & have : devices) {
        if (have->dev == dev) {
            d = have.get();
        }
    }
    if (!d) {
        ggml_backend_t backend = nullptr;
        for (ggml_backend_t b : backends) {
            if (ggml_backend_get_device(b) == dev) {
                backend = b;
            }
        }
        GGML_ASSERT(backend);
        devices.push_back(std::make_unique<device>());
        d = devices.back().get();
        d->dev     = dev;
        d->backend = backend;
    }
    l->backend     = d->backend;
    l->backend_cpu = backends.back();
    l->table.assign(l->n_expert, -1);
    l->seen.resize((size_t) l->limit*l->n_used);
    d->layers.push_back(l.get());
    layers.push_back(std::move(l));
    return true;
}

void llama_expert_cache::refuse(int32_t il, const std::string & why) {
    for (auto & r : refused) {
        if (r.first == why) {
            r.second.push_back(il);
            return;
        }
    }
    refused.push_back({ why, { il } });
}

// Memory of a layer's banks and its other tensors with n slots.
static uint64_t layer_bytes(const llama_expert_layer & l, int32_t n_slots) {
    uint64_t n = l.bytes_slot()*(n_slots + !l.skip);
    for (const ggml_tensor * t : l.extras) {
        n += ggml_nbytes(t);
    }
    return n;
}

bool llama_expert_cache::prepare() {
    std::string why = set->read();
    if (!why.empty()) {
        turn_off(why);
        return false;
    }
    set->policy.window = params.window;
    if (model.hparams.no_alloc) {
        why = "the model's weights are not loaded";
    } else if (model.hparams.n_expert == 0) {
        why = "the model has no experts";
    } else if (cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        why = "not for a draft context";
    } else if (cparams.cb_eval) {
        why = "an evaluation callback is set, it wants to see each node as it is";
    } else if (std::getenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY")) {
        why = "GGML_CUDA_ENABLE_UNIFIED_MEMORY makes the device's memory the host's";
    } else if (set->limit < 1) {
        why = "GGML_OP_OFFLOAD_MIN_BATCH sends all batches to the device";
    }
    if (!why.empty()) {
        turn_off(why);
        return false;
    }

    for (int32_t il = 0; il < (int32_t) model.hparams.n_layer(); il++) {
        if (model.layers[il].ffn_down_exps && !add_layer(il, why)) {
            refuse(il, why);
        }
    }
    for (auto & d : devices) {
        if (!alloc_device(*d, 1)) {
            turn_off(std::string("no memory on ") + ggml_backend_dev_name(d->dev));
            return false;
        }
    }
    if (layers.empty()) {
        turn_off(refused.empty() ? "the model has no routed experts" : reasons());
        return false;
    }
    active = true;
    return true;
}

//
// how many slots
//

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
    log_start();
    return true;
}

//
// use
//

const llama_expert_layer * llama_expert_cache::layer(const ggml_tensor * down, uint32_t n_tokens, const llama_adapter_loras * loras) const {
    const auto found = by_down.find(down);
    if (!active || cparams.warmup || found == by_down.end() || n_tokens > (uint32_t) found->second->limit) {
        return nullptr;
    }
    for (const auto & lora : *loras) {
        for (ggml_tensor * w : found->second->weights) {
            if (lora.first->get_weight(w)) {
                return nullptr;
            }
        }
    }
    return found->second;
}

std::vector<uint32_t> llama_expert_cache::limits() const {
    std::vector<uint32_t> list;
    for (const auto & l : layers) {
        if (active && std::find(list.begin(), list.end(), (uint32_t) l->limit) == list.end()) {
            list.push_back(l->limit);
        }
    }
    return list;
}

std::map<ggml_backend_buffer_type_t, size_t> llama_expert_cache::memory() const {
    std::map<ggml_backend_buffer_type_t, size_t> sizes;
    for (const auto & d : devices) {
        const auto add = [&](ggml_backend_buffer_t buf) {
            if (buf) {
                sizes[ggml_backend_dev_buffer_type(d->dev)] += ggml_backend_buffer_get_size(buf);
            }
        };
        add(d->buf.get());
        for (const llama_expert_layer * l : d->layers) {
            add(l->buf.get());
        }
    }
    return sizes;
}
