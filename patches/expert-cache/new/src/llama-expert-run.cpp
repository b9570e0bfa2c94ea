// SPDX-License-Identifier: MIT

// The idle point: the only place where tables change.

#include "llama-expert-cache-impl.h"

#include "llama-batch.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>

// A draft that was rejected is decoded again at its position; what it chose counts less.
static constexpr float WEIGHT_REJECTED = 0.25f;

void llama_expert_cache::idle(ggml_backend_sched_t sched, const llama_ubatch & ubatch, const llama_adapter_loras * loras) {
    if (!active) {
        return;
    }
    ggml_backend_sched_synchronize(sched);
    const std::lock_guard<std::mutex> lock(mutex);

    if (last_used) {
        time_step(ubatch, ggml_time_us() - t_last);
        feed(ubatch);
    }

    bool waited = false;
    for (auto & d : devices) {
        collect(*d, waited);
        if (last_used) {
            plan(*d);
        }
        publish(*d);
        audit(*d);
    }
    n_waits += waited;

    bool used = false, could = false;
    for (const auto & l : layers) {
        used  = used  || layer(l->weights.back(), ubatch.n_tokens, loras);
        could = could || layer(l->weights.back(), 1, loras);
        l->n_seen = 0;
    }
    bypass = could ? "" : cparams.warmup ? "a warm-up uses all experts" : "an adapter changes the experts";
    n_steps    += used;
    n_bypassed += !used;
    last_used = used;
    last.resize(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        last[i] = { ubatch.seq_id[i][0], ubatch.pos[i] };
    }
    t_last = ggml_time_us();
}

// The time from one decode to the next is what uploads may take a share of. Pauses between requests are not: those that
// do not go on with the last, and what is far from the usual, unless it has become usual.
void llama_expert_cache::time_step(const llama_ubatch & ubatch, int64_t us) {
    bool goes_on = false;
    for (uint32_t i = 0; i < ubatch.n_tokens && ubatch.n_tokens <= (uint32_t) set->limit; i++) {
        for (const token & t : last) {
            goes_on = goes_on || (ubatch.seq_id[i][0] == t.seq && ubatch.pos[i] <= t.pos + 1);
        }
    }
    const double usual = us_step > 0 ? 8*us_step : 2e6;
    if (!goes_on || (us > usual && ++n_unusual < 4)) {
        return;
    }
    n_unusual = 0;
    us_step   = us_step > 0 && us <= usual ? 0.9*us_step + 0.1*us : (double) us;
    for (auto & d : devices) {
        d->policy->time_step(us);
    }
}

void llama_expert_cache::feed(const llama_ubatch & ubatch) {
    std::vector<float> weight(last.size(), 1.0f);
    for (size_t i = 0; i < last.size() && last.size() > 1; i++) {
        for (uint32_t j = 0; j < ubatch.n_tokens; j++) {
            if (ubatch.seq_id[j][0] == last[i].seq && ubatch.pos[j] <= last[i].pos) {
                weight[i] = WEIGHT_REJECTED;
            }
        }
    }
    for (auto & d : devices) {
        for (llama_expert_layer * l : d->layers) {
            // the last layer of a batch has the rows of its outputs only
            const bool all = l->n_seen == (int32_t) last.size();
            for (int32_t i = 0; i < l->n_seen; i++) {
                d->policy->use(l->i_layer, l->seen.data() + (size_t) i*l->n_used, l->n_used, all ? weight[i] : 1.0f);
            }
        }
        d->policy->step((int32_t) last.size());
    }
}

void llama_expert_cache::collect(device & d, bool & waited) {
    bool w = false;
    for (const auto & r : d.up->poll(set->wait, &w)) {
        const llama_expert_policy::swap s = d.in_flight.at(r.id);
        d.in_flight.erase(r.id);
        if (!r.ok) {
            d.n_failed++;
            d.policy->failed(s);
            continue;
        }
        d.n_uploads++;
        d.n_bytes    += r.bytes;
        d.us_uploads += r.us;
        d.policy->time_upload(r.bytes, r.us);
        d.policy->landed(s);
        map(d, s.layer, s.expert, s.slot);
    }
    waited = waited || w;
}

void llama_expert_cache::plan(device & d) {
    for (const llama_expert_policy::swap & s : d.policy->plan()) {
        if (s.victim >= 0) {
            map(d, s.layer, s.victim, -1);
        }
        const llama_expert_layer & l = *d.layers[s.layer];
        llama_expert_uploader::job job = { d.next_id++, {} };
        for (ggml_tensor * w : l.weights) {
            job.parts.push_back({ w, l.twins.at(w), s.expert*w->nb[2], s.slot*w->nb[2], w->nb[2] });
        }
        d.in_flight[job.id] = s;
        // nothing reads the slot: no graph runs, and the next one gets the table without the victim
        d.up->push(std::move(job));
    }
}

void llama_expert_cache::map(device & d, int32_t i_layer, int32_t expert, int32_t slot) {
    llama_expert_layer & l = *d.layers[i_layer];
    GGML_ASSERT((l.table[expert] < 0) != (slot < 0));
    l.table[expert] = slot;
    d.values[l.table_at + expert] = slot >= 0 || l.skip ? slot : l.n_slots;
    d.dirty = true;
}

void llama_expert_cache::publish(device & d) {
    if (d.dirty) {
        ggml_backend_tensor_set_async(d.backend, d.table, d.values.data(), 0, ggml_nbytes(d.table));
        d.dirty = false;
    }
}

void llama_expert_cache::audit(device & d) {
    size_t n_all = 0;
    for (const llama_expert_layer * l : d.layers) {
        n_all += l->n_slots;
    }
    if (set->audit > 0) {
        std::vector<int32_t> table(d.values.size());
        ggml_backend_synchronize(d.backend);
        ggml_backend_tensor_get(d.table, table.data(), 0, ggml_nbytes(d.table));
        GGML_ASSERT(table == d.values && "the device's table is not the host's");
    }
    std::vector<uint8_t> bytes;
    for (int32_t i = 0; i < set->audit; i++) {
        size_t slot = d.audit_at++ % n_all, i_layer = 0;
        while (slot >= (size_t) d.layers[i_layer]->n_slots) {
            slot -= d.layers[i_layer++]->n_slots;
        }
        const llama_expert_layer & l = *d.layers[i_layer];
        const int32_t expert = d.policy->expert((int32_t) i_layer, (int32_t) slot);
        if (expert < 0) {
            continue;
        }
        GGML_ASSERT(l.table[expert] == (int32_t) slot && "the policy's map is not the table");
        for (ggml_tensor * w : l.weights) {
            bytes.resize(w->nb[2]);
            ggml_backend_tensor_get(l.twins.at(w), bytes.data(), slot*w->nb[2], bytes.size());
            if (memcmp(bytes.data(), (const uint8_t *) w->data + expert*w->nb[2], bytes.size()) != 0) {
                GGML_ABORT("expert cache: slot %zu of %s does not hold expert %d", slot, w->name, expert);
            }
        }
    }
}
