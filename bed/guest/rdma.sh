# Shared by the RDMA jobs: two network namespaces, this one and `far`, joined by a veth cable, each with its own
# soft-RoCE device. Or `one`: both sides on one device in this namespace, for kernels whose soft-RoCE only listens in
# the first namespace.

PATH=/rdma:/bin
near=10.9.0.1 far=10.9.0.2 devices=2
# Busybox's shell prefers its own `ip`.
ip() { /rdma/ip "$@"; }

rdma_begin() {
    mkdir -p /run
    mount -t tmpfs run /run
    load crc32_generic veth ib_uverbs rdma_rxe
    ip link set lo up
    if [ "$1" = one ]; then
        one_device
        return
    fi
    ip netns add far
    ip link add v0 type veth peer name v1
    ip link set v1 netns far
    ip addr add $near/24 dev v0
    ip link set v0 up
    in_far ip addr add $far/24 dev v1
    in_far ip link set lo up
    in_far ip link set v1 up
    check "soft-RoCE on this end of the cable" rdma link add near type rxe netdev v0
    check "and on the far one" in_far rdma link add far type rxe netdev v1
    check "both are up" within 5 both_up
}

one_device() {
    far=$near devices=1
    ip link add v0 type veth peer name v1
    ip addr add $near/24 dev v0
    ip link set v0 up
    ip link set v1 up
    check "soft-RoCE" rdma link add near type rxe netdev v0
    check "it is up" within 5 both_up
}

in_far() { ip netns exec far "$@"; }
both_up() { [ "$(cat /sys/class/infiniband/*/ports/1/state | grep -c ACTIVE)" = $devices ]; }

# Starts the far side's test program, and waits until it listens.
far_serves() {
    # The output of an earlier run must not count.
    rm -f /tmp/far
    if [ $devices = 1 ]; then
        onehop-bed rdma-far near $far:7000 >/tmp/far 2>&1 &
    else
        /rdma/ip netns exec far onehop-bed rdma-far far $far:7000 >/tmp/far 2>&1 &
    fi
    far_pid=$!
    within 10 grep -q '^far:' /tmp/far
}
