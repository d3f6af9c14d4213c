import os, sys, time, signal, datetime, threading
import torch, torch.distributed as dist
import multiprocessing as mp
PORT=int(sys.argv[1]); HOW=sys.argv[2]
def rank_main(rank, size):
    torch.set_num_threads(1)
    os.environ['GLOO_SOCKET_IFNAME']='lo'
    store = dist.TCPStore('127.0.0.1', PORT, None, False, datetime.timedelta(seconds=30), wait_for_workers=False)
    def gen(number, members):
        sub = dist.PrefixStore(f'gen{number}', store)
        dist.init_process_group('gloo', store=sub, rank=members.index(rank), world_size=len(members), timeout=datetime.timedelta(seconds=3600))
    gen(0, list(range(size)))
    second = dist.new_group(list(range(size)))
    x = torch.ones(1<<20)
    dist.all_reduce(x); dist.all_reduce(x, group=second)
    if rank == 1:
        if HOW=='kill': os.kill(os.getpid(), signal.SIGKILL)
        if HOW=='stop': os.kill(os.getpid(), signal.SIGSTOP)
    t=time.time()
    if HOW=='stop':
        def aborter():
            time.sleep(2.0)
            t1=time.time()
            try:
                how=sys.argv[3]
                if how=='abort':
                    for g in (second, dist.group.WORLD):
                        b=g._get_backend(torch.device('cpu'))
                        b.abort()
                if how=='cut':
                    import socket
                    for name in os.listdir('/proc/self/fd'):
                        try:
                            s=socket.socket(fileno=os.dup(int(name)))
                            peer=s.getpeername(); own=s.getsockname()
                            if PORT not in (peer[1], own[1]): s.shutdown(socket.SHUT_RDWR)
                            s.close()
                        except (OSError, ValueError): pass
                if how=='shutdown':
                    for g in (second, dist.group.WORLD):
                        g._get_backend(torch.device('cpu')).shutdown()
                print(rank,'abort called', round(time.time()-t1,3), flush=True)
            except BaseException as e: print(rank,'abort failed',repr(e)[:200],flush=True)
        threading.Thread(target=aborter,daemon=True).start()
    try:
        w=dist.all_reduce(x, async_op=True); w.wait(datetime.timedelta(seconds=20)); print(rank,'no error?',flush=True)
    except BaseException as e:
        print(rank,'error after',round(time.time()-t,3),type(e).__name__,str(e)[:160].replace('\n',' '),flush=True)
    t=time.time()
    members=[r for r in range(size) if r!=1]
    try:
        dist.destroy_process_group()
        print(rank,'destroyed',round(time.time()-t,3),flush=True)
    except BaseException as e: print(rank,'destroy failed',repr(e)[:200],flush=True)
    t=time.time()
    gen(1, members)
    y=torch.ones(4); dist.all_reduce(y); print(rank,'new gen',y[0].item(),round(time.time()-t,3),flush=True)
    os._exit(0)
if __name__=='__main__':
    master = dist.TCPStore('127.0.0.1', PORT, None, True, datetime.timedelta(seconds=30), wait_for_workers=False)
    ctx=mp.get_context('fork'); ps=[ctx.Process(target=rank_main,args=(r,4)) for r in range(4)]
    [p.start() for p in ps]
    end=time.time()+40
    for i,p in enumerate(ps):
        if i!=1: p.join(max(0.1,end-time.time()))
    for p in ps: p.kill()
