// SPDX-License-Identifier: MIT

#include "llama-expert-cache.h"

#include "llama-context.h"
#include "llama-impl.h"

void llama_context::init_experts(const llama_expert_cache_params & params) {
    synchronize();
    const auto reserve = [&] {
        sched_need_reserve = true;
        try {
            sched_reserve();
        } catch (const std::exception &) {
            sched_need_reserve = true; // what it left is not whole
            throw;
        }
    };
    if (experts) {
        experts.reset();
        reserve(); // no graph may know its banks
    }
    if (params.n_slots == 0) {
        return;
    }
    auto cache = std::make_unique<llama_expert_cache>(model, cparams, params, backend_ptrs);
    const bool on = cache->prepare();
    experts = std::move(cache);
    if (!on) {
        return;
    }
    try {
        reserve();
    } catch (const std::exception & e) {
        experts->turn_off(e.what());
        reserve();
        return;
    }
    // what is free now is what the context leaves
    gf_res_reserve->reset();
    ggml_backend_sched_reset(sched.get());
    experts->allocate();
}

const llama_expert_cache * llama_context::get_experts() const {
    return experts.get();
}

void llama_expert_cache_init(llama_context * ctx, const llama_expert_cache_params & params) {
    try {
        ctx->init_experts(params);
    } catch (const std::exception & e) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, e.what()); // the next decode tries again, and fails with its own error
    }
}

std::string llama_expert_cache_summary(const llama_context * ctx) {
    const llama_expert_cache * experts = ctx->get_experts();
    return experts ? experts->summary() : "";
}

std::string llama_expert_cache_json(const llama_context * ctx, bool layers) {
    const llama_expert_cache * experts = ctx->get_experts();
    return experts ? experts->json(layers) : "{\"status\": \"off\", \"reason\": \"not asked for (--moe-expert-cache N)\"}";
}

llama_expert_cache_counters llama_expert_cache_count(const llama_context * ctx) {
    const llama_expert_cache * experts = ctx->get_experts();
    return experts ? experts->counters() : llama_expert_cache_counters();
}
