import os, sys, subprocess, glob
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import holdfast.ops.grid_sample.gpu_dinput_by_cell as K, holdfast.ops.grid_sample.gpu_cells as Z, holdfast.ops.grid_sample.gpu_dgrid as D
BIN=[p for p in glob.glob(os.path.join(os.path.dirname(triton.__file__),'backends/nvidia/bin/*')) if p.endswith('cuobjdump')][0]
only=sys.argv[1] if len(sys.argv)>1 else ""
def go(fn, const, warps, label, dt="fp32", regs=None, **int64):
    if only not in label: return
    sig={}; c={}; attrs={}
    P={k:f"*{dt}" for k in("dinput","dout","rows","image")}|{k:"*fp32" for k in("grid","fractions","scales","dgrid")}|{k:"*i32" for k in ("counts","arrivals","tallies","largest","special","words","starts","places","owners","parts","holders","arrived")}|{"sums":"*i64"}
    ints={"parts"} if fn is Z.survey else set()
    for i,a in enumerate(fn.arg_names):
        if a in const: sig[a]="constexpr"; c[(i,)]=const[a]
        elif a in ("dout_step_one",) : pass
        elif a in P and a not in ints:
            sig[a]=P[a]; attrs[(i,)]=[["tt.divisibility",16]]
        elif a in("sizes","out_sizes"): sig[a]=("i32",)*3
        elif a.endswith("_strides"):
            if "dout" in a or "dinput" in a or "image" in a:
                sig[a]=("i32","constexpr","i32","i32"); c[(i,1)]=1; attrs[(i,0)]=[["tt.divisibility",16]]
            else: sig[a]=("i32",)*4
        else:
            sig[a]="i32"
            if a in("channels","row_step","dout_step","dinput_step","image_step"): attrs[(i,)]=[["tt.divisibility",16]]
    opt={"num_warps":warps,"enable_fp_fusion":False}
    if regs: opt["maxnreg"]=regs
    k=triton.compile(ASTSource(fn,sig,constexprs=c,attrs=attrs),target=GPUTarget("cuda",90,32),options=opt)
    open(f'/tmp/{label.replace(" ","_")}.cubin','wb').write(k.asm['cubin'])
    out=subprocess.run([BIN,'-res-usage',f'/tmp/{label.replace(" ","_")}.cubin'],capture_output=True,text=True).stdout.strip().split('\n')[-1]
    sass=subprocess.run([BIN,'-sass',f'/tmp/{label.replace(" ","_")}.cubin'],capture_output=True,text=True).stdout
    open(f'/tmp/{label.replace(" ","_")}.sass','w').write(sass); open(f'/tmp/{label.replace(" ","_")}.ttgir','w').write(k.asm['ttgir'])
    print(label,out, 'instr',sum(1 for l in sass.split('\n') if '/*' in l and ';' in l), flush=True)
S=dict(AXES=2,MODE=1,PADDING=0,ALIGNED=False,COMPUTE=tl.float32)
C=dict(CROWDS=True,CROWD=64,SEGMENT=2048)
for ax in (2,3):
    X=dict(AXES=ax)
    go(K.sum_planes,X|C|dict(LOCALITY=True,FLAT=True,FULL=True,OFFSET=tl.int32,ACCUMULATE=False,PIXELS=128,WIDE=32,SHARE=32),4,f"planes {ax}d")
    go(K.sum_rows,X|C|dict(LOCALITY=True,PLACED=False,FLAT=True,ACCUMULATE=False,PIXELS=32,WIDE=16,CHANNELS=16,BLOCKS=4,UNROLL=2),4,f"rows {ax}d")
go(K.sum_rows,C|dict(AXES=2,LOCALITY=False,PLACED=False,FLAT=True,ACCUMULATE=False,PIXELS=32,WIDE=16,CHANNELS=32,BLOCKS=2,UNROLL=2),4,"rows bf16 placed","bf16")
go(K.sum_segments,dict(LOCALITY=True,AXES=2,FLAT=True,ACCUMULATE=False,SEGMENT=2048,TERMS=64,CHANNELS=16),4,"segments")
go(Z.survey,S|dict(LOCALITY=True,FLAT=True,TILE=128,VECTOR=2048,CHANNELS=1),4,"survey")
go(Z.assign_starts,dict(BLOCK=2048),4,"assign")
go(Z.list_samples,S|dict(LOCALITY=True,TILE=128,SAMPLES=64,CHANNELS=64),4,"list")
G=S|dict(TAPS=2,LOCALITY=True,FULL=True,MANY=False,OFFSET=tl.int32,ACCUMULATE=False,TILE=256,IMAGE_ROWS=False)
for sh in (1,4):
    go(D.grid_gradient,G|dict(BY_CELL=False,DOUT_ROWS=False,SHARED=sh),8,f"dgrid {sh}",regs=80)
    go(D.grid_gradient,G|dict(BY_CELL=True,DOUT_ROWS=True,SHARED=sh),8,f"dgrid cell {sh}")
    go(D.grid_gradient,G|dict(AXES=3,BY_CELL=False,DOUT_ROWS=False,SHARED=sh),8,f"dgrid3d {sh}",regs=80)
for r in (64,72,88,96,112,128):
    go(K.sum_planes,dict(AXES=2)|C|dict(LOCALITY=True,FLAT=True,FULL=True,OFFSET=tl.int32,ACCUMULATE=False,PIXELS=128,WIDE=32,SHARE=32),4,f"pregs {r}",regs=r)
    f=f"/tmp/pregs_{r}.sass"
    if os.path.exists(f) and only in f"pregs {r}":
        o="".join("L" if "LDG" in l else "c" if "F2I" in l else "|" if "BRA" in l else "" for l in open(f))
        print(o[o.index("LLLL|"):] if "LLLL|" in o else o, "LDL", sum("LDL" in l for l in open(f)))
def show(label, mark):
    f=f"/tmp/{label.replace(' ','_')}.sass"
    if only not in label: return
    o="".join("L" if "LDG" in l else "c" if "F2I" in l else "|" if "BRA" in l else "" for l in open(f))
    print(o[-260:], "LDL", sum("LDL" in l for l in open(f)))
for r in (80,96,112,128):
    go(K.sum_planes,dict(AXES=3)|C|dict(LOCALITY=True,FLAT=True,FULL=True,OFFSET=tl.int32,ACCUMULATE=False,PIXELS=128,WIDE=32,SHARE=32),4,f"p3regs {r}",regs=r)
    show(f"p3regs {r}","")
for r in (64,80,96,128):
  for u in (1,2):
    go(K.sum_rows,dict(AXES=2)|C|dict(LOCALITY=True,PLACED=False,FLAT=True,ACCUMULATE=False,PIXELS=32,WIDE=16,CHANNELS=16,BLOCKS=4,UNROLL=u),4,f"rregs {r} {u}",regs=r)
    show(f"rregs {r} {u}","")
