# What the jobs kmod-* share: the module, the drive that it gets and gives back, and what must hold after each of them.

# Binds a device to a driver, or to the one that wants it.
bind_to() {
    local at=/sys/bus/pci/devices/$1
    [ ! -e "$at/driver" ] || echo "$1" >"$at/driver/unbind"
    echo "$2" >"$at/driver_override"
    echo "$1" >/sys/bus/pci/drivers_probe
    [ "$(driver "$1")" = "${2:-$(driver "$1")}" ]
}

modules_dir=/kmod/$(uname -r)
# What an unprivileged user would miss on this machine, as the module names it.
case $BED_IOMMU in
on) missing=nothing ;;
lazy) missing=strict ;;
pass) missing=translation ;;
*) missing="translation alone msi" ;;
esac

# The namespace of the drive under test, once its own driver has found it.
disk() {
    local found
    found=$(ls -d "/sys/bus/pci/devices/$NVME/nvme/"nvme*/nvme*n1 2>/dev/null)
    [ -b "/dev/${found##*/}" ] && echo "/dev/${found##*/}"
}

# The drive with a pattern on it by the kernel's own driver, then in the module's hands.
kmod_begin() {
    load irqbypass nvme
    within 5 disk
    kmod-test fill "$(disk)"
    [ -e /sys/module/onehop ] || check "the module loads" insmod "$modules_dir/onehop.ko"
    check "it binds the drive" bind_to "$NVME" onehop
}

# Back to the kernel's driver, which finds what was there. $1: verify if the tests wrote the disk.
kmod_end() {
    check "the drive goes back to the kernel's driver" bind_to "$NVME" ''
    within 5 disk
    [ -z "$1" ] || kmod-test verify "$(disk)"
    rmmod vramexp 2>/dev/null
    echo 1 >/proc/sys/vm/stat_refresh
    check "all pinned pages are given back" \
        test "$(sed -n 's/nr_foll_pin_acquired //p' /proc/vmstat)" = "$(sed -n 's/nr_foll_pin_released //p' /proc/vmstat)"
    check "the module can be unloaded" rmmod onehop
}

# The VRAM with a driver that exports it: vramexp, or vfio-pci.
exporter() {
    case $1 in
    vramexp) [ -e /sys/module/vramexp ] || insmod "$modules_dir/vramexp.ko" ;;
    *) load vfio vfio_iommu_type1 vfio-pci ;;
    esac
    [ "$(driver "$VRAM")" = "$1" ] || check "the VRAM is bound to $1" bind_to "$VRAM" "$1"
}

no_driver() {
    [ -z "$(driver "$1")" ] || echo "$1" >"/sys/bus/pci/devices/$1/driver/unbind"
}
