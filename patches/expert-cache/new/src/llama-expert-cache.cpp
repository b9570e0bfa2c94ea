// SPDX-License-Identifier: MIT

// Which layers are cached, and which of them a graph is built with.

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
