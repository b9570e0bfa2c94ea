// SPDX-License-Identifier: MIT

#include "sim-memory.h"

#include "sim-check.h"
#include "sim-stream.h"

#include "ggml-impl.h"

#include <cstring>
#include <map>
#include <sys/mman.h>

// Device buffers

namespace {

struct device_buffer {
    sim_device * dev;
    uint8_t    * shown; // the addresses tensors hold: reserved, and neither readable nor writable
    uint8_t    * real;
    size_t       size;
};

device_buffer * context_of(ggml_backend_buffer_t buffer) {
    return (device_buffer *) buffer->context;
}

void buffer_free(ggml_backend_buffer_t buffer) {
    device_buffer * b = context_of(buffer);
    // it waits for the device as cudaFree does; to the race check that is no order, other devices' memory is not so kind
    sim_check_host("free", { { b->real, b->size, true, "a buffer" } });
    sim_stream::drain_device(b->dev);
    {
        std::lock_guard<std::mutex> lock(b->dev->mutex);
        b->dev->count.alloc_bytes -= b->size;
        b->dev->count.buffers--;
    }
    munmap(b->shown, b->size);
    munmap(b->real,  b->size);
    delete b;
}

void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return context_of(buffer)->shown;
}

// what the host does with a device tensor at once, in the words of the race check; *other*: the host memory at the far end
void check_host(const char * what, const ggml_tensor * t, size_t offset, size_t size, bool write, const void * other = nullptr) {
    if (!sim_get_config().check) {
        return;
    }
    std::vector<sim_access> accesses = { { sim_real(sim_buffer_of(t), t->data) + offset, size, write, sim_name_of(t) } };
    if (other) {
        accesses.push_back({ (const uint8_t *) other, size, !write, "host memory" });
    }
    sim_check_host(what, accesses);
}

void buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    check_host("memset", t, offset, size, true);
    memset(sim_real(buffer, t->data) + offset, value, size);
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    sim_device * dev = context_of(buffer)->dev;
    check_host("blocking copy", t, offset, size, true, data);
    sim_transfer(dev, sim_is_pinned(data, size) ? SIM_H2D_PINNED : SIM_H2D_PAGEABLE, size, [&] {
        memcpy(sim_real(buffer, t->data) + offset, data, size);
    });
    dev->count.blocking_copies++;
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    sim_device * dev = context_of(buffer)->dev;
    check_host("blocking copy", t, offset, size, false, data);
    sim_transfer(dev, SIM_D2H, size, [&] {
        memcpy(data, sim_real(buffer, t->data) + offset, size);
    });
    dev->count.blocking_copies++;
}

bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    if (!sim_buffer_is_sim(sim_buffer_of(src))) {
        return false;
    }
    sim_device * from = sim_buffer_device(sim_buffer_of(src));
    const size_t size = ggml_nbytes(src);
    check_host("blocking copy", src, 0, size, false);
    check_host("blocking copy", dst, 0, size, true);
    sim_transfer(from, SIM_D2D, size, [&] {
        memcpy(sim_real(buffer, dst->data), sim_real(sim_buffer_of(src), src->data), size);
    });
    from->count.blocking_copies++;
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    device_buffer * b = context_of(buffer);
    // CUDA's does not wait, and upstream clears the KV cache after a warm-up that may still run: harmless there, but it
    // would end every checked program
    sim_stream::synchronize_device(b->dev);
    sim_check_host("clear", { { b->real, b->size, true, "a buffer" } });
    memset(b->real, value, b->size);
}

const ggml_backend_buffer_i buffer_interface = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

sim_device * device_of(ggml_backend_buffer_type_t buft) {
    return (sim_device *) buft->context;
}

const char * buft_get_name(ggml_backend_buffer_type_t buft) {
    return device_of(buft)->name.c_str();
}

bool reserve(sim_device * dev, size_t size) {
    std::lock_guard<std::mutex> lock(dev->mutex);
    auto & c = dev->count;
    if (size > dev->cfg.mem - c.alloc_bytes || (dev->cfg.max_alloc != 0 && size > dev->cfg.max_alloc)) {
        c.alloc_failed++;
        return false;
    }
    c.alloc_bytes += size;
    c.buffers++;
    if (c.alloc_bytes > c.alloc_peak) {
        c.alloc_peak = c.alloc_bytes.load();
    }
    return true;
}

ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    sim_device * dev = device_of(buft);
    size = std::max<size_t>(size, 1);
    if (!reserve(dev, size)) {
        GGML_LOG_ERROR("%s: allocating %.2f MiB on %s: out of memory\n", __func__, size/1024.0/1024.0, dev->name.c_str());
        return nullptr;
    }
    void * real  = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void * shown = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    GGML_ASSERT(real != MAP_FAILED && shown != MAP_FAILED);
    if (sim_get_config().fill_nan) {
        memset(real, 0xff, size); // a NaN in every float format and an id that no table has
    }
    return ggml_backend_buffer_init(buft, buffer_interface, new device_buffer { dev, (uint8_t *) shown, (uint8_t *) real, size }, size);
}

size_t buft_get_alignment(ggml_backend_buffer_type_t) {
    return 128;
}

size_t buft_get_max_size(ggml_backend_buffer_type_t buft) {
    const size_t limit = device_of(buft)->cfg.max_alloc;
    return limit ? limit : SIZE_MAX;
}

bool buft_is_host(ggml_backend_buffer_type_t) {
    return false;
}

} // namespace

ggml_backend_buffer_type_i sim_buffer_type_interface() {
    return {
        /* .get_name         = */ buft_get_name,
        /* .alloc_buffer     = */ buft_alloc_buffer,
        /* .alloc_buffer_n   = */ nullptr,
        /* .get_alignment    = */ buft_get_alignment,
        /* .get_max_size     = */ buft_get_max_size,
        /* .get_alloc_size   = */ nullptr,
        /* .get_alloc_size_n = */ nullptr,
        /* .is_host          = */ buft_is_host,
    };
}

bool sim_buffer_is_sim(ggml_backend_buffer_t buffer) {
    return buffer && buffer->iface.free_buffer == buffer_free;
}

const char * sim_name_of(const ggml_tensor * t) {
    return t->name[0] ? t->name : ggml_op_name(t->op);
}

ggml_backend_buffer_t sim_buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

sim_device * sim_buffer_device(ggml_backend_buffer_t buffer) {
    return context_of(buffer)->dev;
}

uint8_t * sim_real(ggml_backend_buffer_t buffer, const void * address) {
    const device_buffer * b = context_of(buffer);
    return b->real + ((const uint8_t *) address - b->shown);
}

// Page-locked host memory

namespace {

struct pinned_memory {
    std::mutex                        mutex;
    std::map<const uint8_t *, size_t> ranges;
    size_t                            total = 0;
};

pinned_memory & pinned() {
    static pinned_memory * p = new pinned_memory;
    return *p;
}

const char * host_buft_get_name(ggml_backend_buffer_type_t) {
    return "SIM_Host";
}

void host_buffer_free(ggml_backend_buffer_t buffer) {
    {
        std::lock_guard<std::mutex> lock(pinned().mutex);
        pinned().ranges.erase((const uint8_t *) buffer->context);
        pinned().total -= buffer->size;
    }
    sim_check_host("free", { { (const uint8_t *) buffer->context, buffer->size, true, "a host buffer" } });
    sim_stream::drain_device(nullptr);
    ggml_aligned_free(buffer->context, buffer->size);
}

// What the CPU buffer's functions do, looked at first: queued copies may still use the memory.

uint8_t * checked(const char * what, const ggml_tensor * t, size_t offset, size_t size, bool write) {
    uint8_t * data = (uint8_t *) t->data + offset;
    if (sim_get_config().check) {
        sim_check_host(what, { { data, size, write, sim_name_of(t) } });
    }
    return data;
}

void host_buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    memset(checked("memset", t, offset, size, true), value, size);
}

void host_buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    memcpy(checked("set", t, offset, size, true), data, size);
}

void host_buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    memcpy(data, checked("get", t, offset, size, false), size);
}

bool host_buffer_cpy_tensor(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    if (!ggml_backend_buffer_is_host(sim_buffer_of(src))) {
        return false;
    }
    const size_t size = ggml_nbytes(src);
    const uint8_t * from = checked("copy", src, 0, size, false);
    memcpy(checked("copy", dst, 0, size, true), from, size);
    return true;
}

void host_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    sim_check_host("clear", { { (const uint8_t *) buffer->context, buffer->size, true, "a host buffer" } });
    memset(buffer->context, value, buffer->size);
}

ggml_backend_buffer_t host_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    {
        std::lock_guard<std::mutex> lock(pinned().mutex);
        if (size > sim_get_config().pin_limit - std::min(pinned().total, sim_get_config().pin_limit)) {
            // as the CUDA backend does: ordinary memory, and nothing but a debug line
            GGML_LOG_DEBUG("%s: failed to allocate %.2f MiB of pinned memory: over GGML_SIM_PIN\n", __func__, size/1024.0/1024.0);
            return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
        }
        pinned().total += size;
    }
    void * data = ggml_aligned_malloc(size);
    GGML_ASSERT(data != nullptr);
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(data, size);
    buffer->buft                = buft;
    buffer->iface.free_buffer   = host_buffer_free;
    buffer->iface.memset_tensor = host_buffer_memset_tensor;
    buffer->iface.set_tensor    = host_buffer_set_tensor;
    buffer->iface.get_tensor    = host_buffer_get_tensor;
    buffer->iface.cpy_tensor    = host_buffer_cpy_tensor;
    buffer->iface.clear         = host_buffer_clear;
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges[(const uint8_t *) data] = size;
    return buffer;
}

} // namespace

ggml_backend_buffer_type_t sim_host_buffer_type() {
    static ggml_backend_buffer_type type = {
        /* .iface   = */ {
            /* .get_name         = */ host_buft_get_name,
            /* .alloc_buffer     = */ host_buft_alloc_buffer,
            /* .alloc_buffer_n   = */ nullptr,
            /* .get_alignment    = */ ggml_backend_cpu_buffer_type()->iface.get_alignment,
            /* .get_max_size     = */ nullptr,
            /* .get_alloc_size   = */ ggml_backend_cpu_buffer_type()->iface.get_alloc_size,
            /* .get_alloc_size_n = */ nullptr,
            /* .is_host          = */ ggml_backend_cpu_buffer_type()->iface.is_host,
        },
        /* .device  = */ &sim_get_device(0)->dev,
        /* .context = */ nullptr,
    };
    return &type;
}

bool sim_is_pinned(const void * address, size_t size) {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    const uint8_t * p = (const uint8_t *) address;
    auto it = pinned().ranges.upper_bound(p);
    if (it == pinned().ranges.begin()) {
        return false;
    }
    --it;
    return p + size <= it->first + it->second;
}
