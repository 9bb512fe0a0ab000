//! Whether a running kernel sees what another device writes: the GPU that owns the memory decides.

use super::*;

#[test]
fn the_owner_of_memory_decides_whether_device_writes_are_ordered() {
    let test = "ordering::the_owner_of_memory_decides_whether_device_writes_are_ordered";
    let Some(model) = Model::or_child(test) else { return };
    let orders = |own, other| {
        model.set("order_0", own);
        model.set("order_1", other);
        let cuda = Cuda::load().unwrap();
        let (gpu, neighbour) = (cuda.open("0").unwrap(), cuda.open("1").unwrap());
        let alloc = |gpu: &CudaGpu, place| gpu.alloc(place, 4096).unwrap();
        let memory =
            [alloc(&gpu, Place::Vram), alloc(&neighbour, Place::Vram), alloc(&gpu, Place::PinnedHost)];
        memory.map(|region| gpu.orders_device_writes(region.addr()).is_ok())
    };
    // None, for its owner (100), for all devices (200). Host memory is always ordered.
    assert_eq!(orders(0, 200), [false, true, true]);
    assert_eq!(orders(100, 0), [true, false, true]);
    assert_eq!(orders(200, 100), [true, false, true]);
    assert_eq!(orders(200, 200), [true, true, true]);
    let unknown = gpu().orders_device_writes(GpuAddr(1 << 40));
    assert!(unknown.is_err(), "the owner of an unknown address orders writes");
}
