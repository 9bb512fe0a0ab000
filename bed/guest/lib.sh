# Shared by the jobs of a guest. Sourced by init.

pass() { echo "PASS $JOB: $*"; }
fail() { echo "FAIL $JOB: $*"; }
skip() { echo "SKIP $JOB: $*"; }

# check WHAT COMMAND...: passes if the command succeeds; otherwise prints its output.
check() {
    local what=$1
    shift
    local got=0
    "$@" >/tmp/said 2>&1 || got=$?
    if [ $got = 0 ]; then
        pass "$what"
    else
        sed 's/^/    /' /tmp/said
        fail "$what (status $got: $*)"
    fi
}

# status N WHAT COMMAND...: passes if the command ends with this status.
status() {
    local want=$1 what=$2 got
    shift 2
    "$@" >/tmp/said 2>&1
    got=$?
    if [ $got = "$want" ]; then
        pass "$what"
    else
        sed 's/^/    /' /tmp/said
        fail "$what (status $got and not $want: $*)"
    fi
}

# answered COMMAND...: whether it ends with an answer, not with a panic or a signal.
answered() {
    "$@" >/tmp/said 2>&1
    local got=$?
    sed 's/^/    /' /tmp/said | head -n 3
    case $got in 0 | 1 | 2 | 3) return 0 ;; *) return 1 ;; esac
}

# The addresses of the devices with this VENDOR:DEVICE.
device() {
    local at vendor id
    for at in /sys/bus/pci/devices/*; do
        read -r vendor <"$at/vendor"
        read -r id <"$at/device"
        [ "$vendor:$id" != "$1" ] || echo "${at##*/}"
    done
}

# Loads modules by name, with their dependencies; built-in ones need no loading.
load() {
    local module for file name
    for module in "$@"; do
        while read -r for file; do
            name=${file%.ko}
            [ "$for" != "$module" ] || [ -e "/sys/module/${name//-/_}" ] || insmod "/modules/$file"
        done </modules/order
    done
}

# Older kernels' ext4 requests its checksums by name.
load_ext4() { load crc32c_generic ext4; }

# The driver of a device; empty if it has none.
driver() {
    local link
    link=$(readlink "/sys/bus/pci/devices/$1/driver") && echo "${link##*/}"
}

# Seconds on an idle machine, as seconds here: bed/run knows how busy this one is.
patiently() { echo $(($1 * ${BED_PATIENCE:-1})); }

# within SECONDS COMMAND...: waits until the command succeeds.
within() {
    local left=$(($(patiently "$1") * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        usleep 100000
    done
}

# Where the modules built for this kernel are.
modules_dir=/kmod/$(uname -r)

# Loads the drivers through which ours reaches a device: the kernel's own, and our module if this machine has it.
load_ways() {
    local module=$modules_dir/onehop.ko
    load nvme vfio_iommu_type1 vfio-pci irqbypass
    [ ! -e "$module" ] || [ -e /sys/module/onehop ] || check "the module loads" insmod "$module"
}

# Binds a device to a driver, or with '' to its default one.
bind_to() {
    local at=/sys/bus/pci/devices/$1
    [ ! -e "$at/driver" ] || echo "$1" >"$at/driver/unbind"
    echo "$2" >"$at/driver_override"
    echo "$1" >/sys/bus/pci/drivers_probe
    [ -z "$2" ] || [ "$(driver "$1")" = "$2" ]
}

# exporter DRIVER [OPTION]: the VRAM, with a driver that exports it: vramexp or vfio-pci.
exporter() {
    case $1 in
    vramexp) [ -e /sys/module/vramexp ] || insmod "$modules_dir/vramexp.ko" $2 ;;
    *) load vfio vfio_iommu_type1 vfio-pci ;;
    esac
    [ "$(driver "$VRAM")" = "$1" ] || check "the VRAM is bound to $1" bind_to "$VRAM" "$1"
}

# Runs our tests; a bad exit status is a failure, whatever was printed before.
ours() {
    load_ways
    within 5 drives_it "$NVME"
    onehop-bed "$@"
    local status=$?
    [ $status = 0 ] || fail "onehop-bed $* ended with status $status"
}

# The same, next to a program that exports memory and passes it on: ours_beside KIND ARGUMENT...
ours_beside() {
    local kind=$1 status
    shift
    load_ways
    within 5 drives_it "$NVME"
    kmod-test export "$kind" /bin/onehop-bed "$@"
    status=$?
    [ $status = 0 ] || fail "onehop-bed $* ended with status $status"
}

# The block device of a drive.
nvme_of() {
    local name
    for name in "/sys/bus/pci/devices/$1/nvme/"nvme*/nvme*n1; do
        name=${name##*/}
        # With multipath it is listed as nvme0c0n1.
        echo "/dev/$(echo "$name" | sed 's/c[0-9]*n/n/')"
    done
}

# Whether the kernel's driver has the drive.
drives_it() {
    [ "$(driver "$1")" = nvme ] && [ -b "$(nvme_of "$1")" ]
}

# Whether the kernel drives the device and can read it.
kernel_has() {
    check "the kernel's driver has $1" within 5 drives_it "$1"
    check "and reads it" dd if="$(nvme_of "$1")" of=/dev/null bs=4096 count=1 iflag=direct
}

# The kernel's complaints in its log; fails if there are none.
complaints() {
    dmesg | grep -v 'mitigation options' |
        grep -E 'BUG:|WARNING:|Oops:|KASAN|DMAR:.*fault|soft lockup|possible .* deadlock'
}
