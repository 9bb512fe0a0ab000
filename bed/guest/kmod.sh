# What the jobs kmod-* share: the module, the drive that it gets and gives back, and what must hold after each of them.

# What an unprivileged user would miss on this machine, as the module names it.
case $BED_IOMMU in
on) missing=nothing ;;
lazy) missing=strict ;;
pass) missing=translation ;;
direct) missing=direct ;;
*) missing="translation alone msi" ;;
esac

# The drive with a pattern on it by the kernel's own driver, then in the module's hands.
kmod_begin() {
    load irqbypass nvme
    within 5 drives_it "$NVME"
    kmod-test fill "$(nvme_of "$NVME")"
    [ -e /sys/module/onehop ] || check "the module loads" insmod "$modules_dir/onehop.ko"
    check "it binds the drive" bind_to "$NVME" onehop
}

# Back to the kernel's driver, which finds what was there. $1: verify if the tests wrote the disk.
kmod_end() {
    bind_to "$NVME" ''
    check "the drive goes back to the kernel's driver" within 5 drives_it "$NVME"
    [ -z "$1" ] || kmod-test verify "$(nvme_of "$NVME")"
    rmmod vramexp 2>/dev/null
    echo 1 >/proc/sys/vm/stat_refresh
    check "all pinned pages are given back" \
        test "$(sed -n 's/nr_foll_pin_acquired //p' /proc/vmstat)" = "$(sed -n 's/nr_foll_pin_released //p' /proc/vmstat)"
    check "the module can be unloaded" rmmod onehop
    # It goes off at its first complaint.
    [ ! -e /proc/lockdep_stats ] || check "lockdep was on" grep -q 'debug_locks: *1' /proc/lockdep_stats
}

no_driver() {
    [ -z "$(driver "$1")" ] || echo "$1" >"/sys/bus/pci/devices/$1/driver/unbind"
}
