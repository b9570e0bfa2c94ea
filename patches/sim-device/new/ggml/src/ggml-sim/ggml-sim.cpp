// SPDX-License-Identifier: MIT

#include "ggml-sim.h"

#include "sim-check.h"
#include "sim-config.h"
#include "sim-graph.h"
#include "sim-host.h"
#include "sim-memory.h"
#include "sim-stats.h"
#include "sim-stream.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace { // Backend: one queue

struct backend_context {
    sim_device * dev;
    ggml_backend_t cpu; // does the arithmetic, on the queue's worker only
    std::map<uint64_t, std::shared_ptr<sim_graph>> graphs; // by uid, which grow: the first is the oldest
    std::unique_ptr<sim_stream> stream;
};

backend_context * context_of(ggml_backend_t backend) {
    return (backend_context *) backend->context;
}

const char * backend_get_name(ggml_backend_t backend) {
    return context_of(backend)->dev->name.c_str();
}

void backend_free(ggml_backend_t backend) {
    backend_context * ctx = context_of(backend);
    ctx->stream.reset();
    ggml_backend_free(ctx->cpu);
    delete ctx;
    delete backend;
}

const size_t MAX_GRAPHS = 256; // that a queue remembers: most uids never come again
const size_t STAGED_AT_ONCE = 64*1024; // pageable bytes that CUDA's asynchronous copies take along without waiting

void queue_copy(sim_stream & stream, const char * what, std::vector<sim_access> accesses, std::function<void()> task) {
    sim_check_queue(stream.id(), what, accesses);
    stream.push(std::move(task));
}

void backend_set_tensor_async(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    sim_stream & stream = *context_of(backend)->stream;
    sim_device * dev    = stream.device();
    uint8_t    * dst    = sim_real(sim_buffer_of(t), t->data) + offset;

    if (sim_is_pinned(data, size)) {
        queue_copy(stream, "an upload", { { dst, size, true, sim_name_of(t) }, { (const uint8_t *) data, size, false, "host memory" } },
            [=] { sim_transfer(dev, SIM_H2D_PINNED, size, [&] { memcpy(dst, data, size); }); });
        return;
    }
    // the host reads pageable memory itself: a little is staged at once, more holds the call until it is sent
    sim_check_host("an upload", { { (const uint8_t *) data, size, false, "host memory" } });
    const bool at_once = size <= STAGED_AT_ONCE;
    auto staged = std::make_shared<std::vector<uint8_t>>((const uint8_t *) data, (const uint8_t *) data + (at_once ? size : 0));
    const void * from = at_once ? staged->data() : data;
    queue_copy(stream, "an upload", { { dst, size, true, sim_name_of(t) } },
        [=] { sim_transfer(dev, SIM_H2D_PAGEABLE, size, [&, staged] { memcpy(dst, from, size); }); });
    if (!at_once) {
        stream.drain(); // by itself no promise that earlier work is over: the race check takes nothing from it
    }
}

void backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    sim_stream    & stream = *context_of(backend)->stream;
    sim_device    * dev    = stream.device();
    const uint8_t * src    = sim_real(sim_buffer_of(t), t->data) + offset;

    queue_copy(stream, "a download", { { src, size, false, sim_name_of(t) }, { (const uint8_t *) data, size, true, "host memory" } },
        [=] { sim_transfer(dev, SIM_D2H, size, [&] { memcpy(data, src, size); }); });
    if (!sim_is_pinned(data, size)) {
        stream.synchronize(); // a copy to pageable memory returns when it is done
    }
}

bool backend_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst, const ggml_tensor * src, ggml_tensor * dst) {
    ggml_backend_buffer_t buf_src = sim_buffer_of(src);
    ggml_backend_buffer_t buf_dst = sim_buffer_of(dst);
    if (!ggml_backend_is_sim(backend_src) || !ggml_backend_is_sim(backend_dst) || !sim_buffer_is_sim(buf_src) || !sim_buffer_is_sim(buf_dst)) {
        return false;
    }
    sim_stream & from = *context_of(backend_src)->stream;
    sim_stream & to   = *context_of(backend_dst)->stream;
    if (sim_buffer_device(buf_src) != from.device() || sim_buffer_device(buf_dst) != to.device()) {
        return false;
    }
    // on the source's queue; the destination's waits for it. Earlier readers of dst are the caller's business.
    sim_device    * dev  = from.device();
    const size_t    size = ggml_nbytes(dst);
    const uint8_t * real_src = sim_real(buf_src, src->data);
    uint8_t       * real_dst = sim_real(buf_dst, dst->data);
    queue_copy(from, "a device copy", { { real_src, size, false, sim_name_of(src) }, { real_dst, size, true, sim_name_of(dst) } },
        [=] { sim_transfer(dev, SIM_D2D, size, [&] { memcpy(real_dst, real_src, size); }); });
    if (&from != &to) {
        to.wait(from.record());
    }
    return true;
}

void backend_synchronize(ggml_backend_t backend) {
    context_of(backend)->stream->synchronize();
}

std::shared_ptr<sim_graph> snapshot(backend_context * ctx, const ggml_cgraph * cgraph) {
    if (cgraph->uid == 0) {
        return std::make_shared<sim_graph>(cgraph, ctx->dev);
    }
    // the same uid promises the same graph at the same addresses: like a captured CUDA graph, it is not looked at again
    auto & kept = ctx->graphs[cgraph->uid];
    if (!kept) {
        kept = std::make_shared<sim_graph>(cgraph, ctx->dev);
    }
    const std::shared_ptr<sim_graph> found = kept;
    if (ctx->graphs.size() > MAX_GRAPHS) {
        ctx->graphs.erase(ctx->graphs.begin());
    }
    return found;
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    backend_context * ctx = context_of(backend);
    std::shared_ptr<sim_graph> graph = snapshot(ctx, cgraph);

    const int    stream = ctx->stream->id();
    const bool   check  = sim_get_config().check;
    uint64_t     handle = 0;
    if (check) {
        handle = sim_check_queue(stream, "a graph", sim_graph_accesses(graph->get(), false), graph->banks());
    }
    ggml_backend_t cpu = ctx->cpu;
    ctx->stream->push([=] {
        ggml_sim_host_set_device_thread();
        const ggml_status status = graph->compute(cpu, stream, handle);
        GGML_ASSERT(status == GGML_STATUS_SUCCESS);
    });
    ctx->dev->count.graphs++;
    ctx->dev->count.nodes += graph->n_nodes();
    return GGML_STATUS_SUCCESS;
}

// Events

typedef std::shared_ptr<sim_ticket> event_context; // of the last record, none before the first

void backend_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    *(event_context *) event->context = context_of(backend)->stream->record();
}

void backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    const event_context & ticket = *(event_context *) event->context;
    if (ticket) {
        context_of(backend)->stream->wait(ticket);
    }
}

const ggml_backend_i backend_interface = {
    /* .get_name            = */ backend_get_name,
    /* .free                = */ backend_free,
    /* .set_tensor_async    = */ backend_set_tensor_async,
    /* .get_tensor_async    = */ backend_get_tensor_async,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ backend_cpy_tensor_async,
    /* .synchronize         = */ backend_synchronize,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ backend_graph_compute,
    /* .event_record        = */ backend_event_record,
    /* .event_wait          = */ backend_event_wait,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6c, 0x66, 0x2d, 0x73, 0x69, 0x6d, 0x11, 0x43, 0x9e, 0x02, 0x5b, 0x77, 0x0f, 0xa8, 0x31, 0xd4 };
    return &guid;
}

// Device

sim_device * device_of(ggml_backend_dev_t dev) {
    return (sim_device *) dev->context;
}

const char * device_get_name(ggml_backend_dev_t dev) {
    return device_of(dev)->name.c_str();
}

const char * device_get_description(ggml_backend_dev_t dev) {
    return device_of(dev)->description.c_str();
}

void device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    *total = device_of(dev)->cfg.mem;
    *free  = *total - device_of(dev)->count.alloc_bytes;
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {
        /* .async                = */ true,
        /* .host_buffer          = */ true,
        /* .buffer_from_host_ptr = */ false,
        /* .events               = */ true,
        /* .mmap_support         = */ true,
    };
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    GGML_ASSERT(cpu && "the simulated devices compute with the CPU backend");
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
    auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    set_n_threads(cpu, device_of(dev)->cfg.threads);

    backend_context * ctx = new backend_context;
    ctx->dev    = device_of(dev);
    ctx->cpu    = cpu;
    ctx->stream.reset(new sim_stream(ctx->dev));
    return new ggml_backend {
        /* .guid    = */ backend_guid(),
        /* .iface   = */ backend_interface,
        /* .device  = */ dev,
        /* .context = */ ctx,
    };
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    return &device_of(dev)->buft;
}

ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t) {
    return sim_host_buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
        case GGML_OP_CUSTOM:
            return false; // host code
        default:
            return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
    }
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &device_of(dev)->buft;
}

// as the CUDA backend: the rows of the batch against GGML_OP_OFFLOAD_MIN_BATCH
bool device_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    int64_t batch = 0;
    switch (op->op) {
        case GGML_OP_GET_ROWS:                          break;
        case GGML_OP_MUL_MAT:    batch = op->ne[1];     break;
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK:  batch = op->ne[2];     break;
        default:                 batch = ggml_nrows(op);
    }
    return batch >= sim_get_config().offload_min_batch;
}

ggml_backend_event_t device_event_new(ggml_backend_dev_t dev) {
    return new ggml_backend_event { /* .device = */ dev, /* .context = */ new event_context };
}

void device_event_free(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete (event_context *) event->context;
    delete event;
}

void device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    const event_context ticket = *(event_context *) event->context;
    if (ticket) {
        sim_stream::host_wait(ticket, device_of(dev));
    }
}

const ggml_backend_device_i device_interface = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ device_get_props,
    /* .init_backend         = */ device_init_backend,
    /* .get_buffer_type      = */ device_get_buffer_type,
    /* .get_host_buffer_type = */ device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buft,
    /* .offload_op           = */ device_offload_op,
    /* .event_new            = */ device_event_new,
    /* .event_free           = */ device_event_free,
    /* .event_synchronize    = */ device_event_synchronize,
};

// Registry

void check_host_graph(const ggml_cgraph * graph) {
    sim_check_host("a CPU graph", sim_graph_accesses(graph, true));
}

std::vector<std::unique_ptr<sim_device>> make_devices() {
    std::vector<std::unique_ptr<sim_device>> out;
    const auto & configs = sim_get_config().devices;
    for (size_t i = 0; i < configs.size(); i++) {
        std::unique_ptr<sim_device> d(new sim_device);
        d->index       = (int) i;
        d->name        = "SIM" + std::to_string(i);
        d->description = "simulated GPU, computes on the CPU";
        d->cfg         = configs[i];
        d->dev         = { /* .iface = */ device_interface, /* .reg = */ ggml_backend_sim_reg(), /* .context = */ d.get() };
        d->buft        = { /* .iface = */ sim_buffer_type_interface(), /* .device = */ &d->dev, /* .context = */ d.get() };
        out.push_back(std::move(d));
    }
    if (!out.empty()) {
        if (sim_get_config().check) {
            ggml_sim_host()->begin = check_host_graph;
        }
        if (!sim_get_config().stats.empty()) {
            std::atexit(sim_write_stats);
        }
    }
    return out;
}

std::vector<std::unique_ptr<sim_device>> & devices() {
    static auto * list = new std::vector<std::unique_ptr<sim_device>>(make_devices()); // outlives all backends
    return *list;
}

const char * reg_get_name(ggml_backend_reg_t) {
    return "SIM";
}

size_t reg_get_device_count(ggml_backend_reg_t) {
    return sim_get_config().devices.size();
}

ggml_backend_dev_t reg_get_device(ggml_backend_reg_t, size_t index) {
    return &sim_get_device(index)->dev;
}

void * reg_get_proc_address(ggml_backend_reg_t, const char *) {
    return nullptr;
}

} // namespace

size_t sim_n_devices() {
    return devices().size();
}

sim_device * sim_get_device(size_t index) {
    GGML_ASSERT(index < devices().size());
    return devices()[index].get();
}

bool ggml_backend_is_sim(ggml_backend_t backend) {
    return backend != nullptr && ggml_guid_matches(backend->guid, backend_guid());
}

ggml_backend_reg_t ggml_backend_sim_reg(void) {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ {
            /* .get_name         = */ reg_get_name,
            /* .get_device_count = */ reg_get_device_count,
            /* .get_device       = */ reg_get_device,
            /* .get_proc_address = */ reg_get_proc_address,
        },
        /* .context = */ nullptr,
    };
    return &reg;
}

GGML_BACKEND_DL_IMPL(ggml_backend_sim_reg)
