#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <sys/mman.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec*1e-9;}
#define COLS 2048
static float x[COLS] __attribute__((aligned(64)));
static uint8_t *base; static size_t bytes;
static float sink[2];
#define H(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p)))
static inline float hs(__m256 a,__m256 b,__m256 c,__m256 d){a=_mm256_add_ps(_mm256_add_ps(a,b),_mm256_add_ps(c,d));float t[8];_mm256_storeu_ps(t,a);return t[0]+t[1]+t[2]+t[3]+t[4]+t[5]+t[6]+t[7];}
#define DOT(NAME,PF) static float NAME(const uint16_t*a){int s4=0;(void)s4;__m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0;\
 for(int i=0;i<COLS;i+=32){ PF; s0=_mm256_fmadd_ps(H(a+i),_mm256_loadu_ps(x+i),s0);s1=_mm256_fmadd_ps(H(a+i+8),_mm256_loadu_ps(x+i+8),s1);s2=_mm256_fmadd_ps(H(a+i+16),_mm256_loadu_ps(x+i+16),s2);s3=_mm256_fmadd_ps(H(a+i+24),_mm256_loadu_ps(x+i+24),s3);} return hs(s0,s1,s2,s3);}
DOT(d_plain,)
DOT(d_t0_8,_mm_prefetch((const char*)(a+i)+512,_MM_HINT_T0))
DOT(d_t0_16,_mm_prefetch((const char*)(a+i)+1024,_MM_HINT_T0))
DOT(d_t0_32,_mm_prefetch((const char*)(a+i)+2048,_MM_HINT_T0))
DOT(d_t0_64,_mm_prefetch((const char*)(a+i)+4096,_MM_HINT_T0))
DOT(d_t1_64,_mm_prefetch((const char*)(a+i)+4096,_MM_HINT_T1))
DOT(d_t0_128,_mm_prefetch((const char*)(a+i)+8192,_MM_HINT_T0))
DOT(d_nta_16,_mm_prefetch((const char*)(a+i)+1024,_MM_HINT_NTA))
DOT(d_nta_32,_mm_prefetch((const char*)(a+i)+2048,_MM_HINT_NTA))
DOT(d_nta_64,_mm_prefetch((const char*)(a+i)+4096,_MM_HINT_NTA))
DOT(d_t1_12,_mm_prefetch((const char*)(a+i)+768,_MM_HINT_T1))
DOT(d_t1_20,_mm_prefetch((const char*)(a+i)+1280,_MM_HINT_T1))
DOT(d_t1_24,_mm_prefetch((const char*)(a+i)+1536,_MM_HINT_T1))
DOT(d_t1_28,_mm_prefetch((const char*)(a+i)+1792,_MM_HINT_T1))
DOT(d_t0_12,_mm_prefetch((const char*)(a+i)+768,_MM_HINT_T0))
DOT(d_t0_20,_mm_prefetch((const char*)(a+i)+1280,_MM_HINT_T0))
DOT(d_t0_24,_mm_prefetch((const char*)(a+i)+1536,_MM_HINT_T0))
DOT(d_ld16,s4|=*(const volatile int*)((const char*)(a+i)+1024))
DOT(d_ld32,s4|=*(const volatile int*)((const char*)(a+i)+2048))
DOT(d_t1_16,_mm_prefetch((const char*)(a+i)+1024,_MM_HINT_T1))
static float d_sum(const uint16_t*a){__m256i s=_mm256_setzero_si256(),t=s;for(int i=0;i<COLS;i+=32){s=_mm256_or_si256(s,_mm256_loadu_si256((void*)(a+i)));t=_mm256_or_si256(t,_mm256_loadu_si256((void*)(a+i+16)));}s=_mm256_or_si256(s,t);return _mm256_extract_epi32(s,0);}
// touch one word a line
static float d_line(const uint16_t*a){int s=0;for(int i=0;i<COLS;i+=32)s|=*(const volatile int*)(a+i);return s;}
static float d_4row(const uint16_t*a){ // four rows side by side
 return 0;}
typedef float(*F)(const uint16_t*);
struct {const char*n;F f;} fs[]={{"or",d_sum},{"line",d_line},{"plain",d_plain},{"t0 8",d_t0_8},{"t0 16",d_t0_16},{"t0 32",d_t0_32},{"t0 64",d_t0_64},{"t0 128",d_t0_128},{"t1 16",d_t1_16},{"t1 64",d_t1_64},{"nta16",d_nta_16},{"nta32",d_nta_32},{"nta64",d_nta_64}};

// more variants: bursts
#define FMA4(i) s0=_mm256_fmadd_ps(H(a+i),_mm256_loadu_ps(x+i),s0);s1=_mm256_fmadd_ps(H(a+i+8),_mm256_loadu_ps(x+i+8),s1);s2=_mm256_fmadd_ps(H(a+i+16),_mm256_loadu_ps(x+i+16),s2);s3=_mm256_fmadd_ps(H(a+i+24),_mm256_loadu_ps(x+i+24),s3);
static float d_b4(const uint16_t*a){__m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0;for(int i=0;i<COLS;i+=128){for(int k=4;k<8;k++)__builtin_prefetch(a+i+32*k,0,0);FMA4(i)FMA4(i+32)FMA4(i+64)FMA4(i+96)}return hs(s0,s1,s2,s3);}
static float d_b4t0(const uint16_t*a){__m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0;for(int i=0;i<COLS;i+=128){for(int k=8;k<12;k++)__builtin_prefetch(a+i+32*k,0,3);FMA4(i)FMA4(i+32)FMA4(i+64)FMA4(i+96)}return hs(s0,s1,s2,s3);}
static float d_b16(const uint16_t*a){__m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0;for(int i=0;i<COLS;i+=512){for(int k=16;k<32;k++)__builtin_prefetch(a+i+32*k,0,3);for(int j=0;j<512;j+=32){FMA4(i+j)}}return hs(s0,s1,s2,s3);}
// touch next row 1 load a line while computing this one (real loads)
static float d_two(const uint16_t*a){ // two halves of the row as two streams (1 page each)
 __m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0;for(int i=0;i<COLS/2;i+=32){FMA4(i)FMA4(i+COLS/2)}return hs(s0,s1,s2,s3);}
typedef float(*F2)(const uint16_t*);

#define ROW (COLS*2)
static float outv[2][COLS] __attribute__((aligned(64)));
static inline __attribute__((always_inline)) float dota(const uint16_t*a,long ahead,int on,int same){__m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0;
 for(int i=0;i<COLS;i+=32){ if(on)_mm_prefetch((const char*)(a+i)+ahead,_MM_HINT_T1); if(same)_mm_prefetch((const char*)(a+i)+1024,_MM_HINT_T0); FMA4(i)} return hs(s0,s1,s2,s3);}
static inline __attribute__((always_inline)) void toucha(const uint16_t*a,long ahead,int on,int same){__m256i s=_mm256_setzero_si256();for(int i=0;i<COLS;i+=32){if(on)_mm_prefetch((const char*)(a+i)+ahead,_MM_HINT_T1);if(same)_mm_prefetch((const char*)(a+i)+1024,_MM_HINT_T0);s=_mm256_or_si256(s,_mm256_load_si256((void*)(a+i)));} volatile int q=_mm256_extract_epi32(s,0);(void)q;}
static inline __attribute__((always_inline)) void axpy(float a,const uint16_t*w,float*o){__m256 c=_mm256_set1_ps(a);for(int i=0;i<COLS;i+=8)_mm256_store_ps(o+i,_mm256_fmadd_ps(c,H(w+i),_mm256_load_ps(o+i)));}
static inline __attribute__((always_inline)) void axpyp(float a,const uint16_t*w,float*o,long ahead){__m256 c=_mm256_set1_ps(a);for(int i=0;i<COLS;i+=8){if(i%32==0)_mm_prefetch((const char*)(w+i)+ahead,_MM_HINT_T1);_mm256_store_ps(o+i,_mm256_fmadd_ps(c,H(w+i),_mm256_load_ps(o+i)));}}
// mode bits: which rows prefetch next block's same row; s: same-row 1KiB; t: touch before axpy
#define VAR(NAME,P0,P1,P2,S,T,D) static float NAME(const uint8_t*b,long next,int me){ \
 float g=dota((uint16_t*)b,next D,P0,S),u=dota((uint16_t*)(b+ROW),next D,P1,S); \
 if(T){toucha((uint16_t*)(b+2*ROW),next D,P2,S);axpy(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me]);} else if(P2) axpyp(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me],next D); else axpy(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me]); return g;}
VAR(v_none,0,0,0,0,1,)
VAR(v_none_s,0,0,0,1,1,)
VAR(v_all,1,1,1,0,1,)
VAR(v_all_nt,1,1,1,0,0,)
VAR(v_up0,0,1,0,0,1,-ROW)
VAR(v_up0s,0,1,0,1,1,-ROW)
VAR(v_dn0,0,0,1,0,1,-2*ROW)
VAR(v_gu,1,1,0,0,1,)
VAR(v_all_s,1,1,1,1,1,)

static float o_none(const uint8_t*b,long next,int me){toucha((uint16_t*)b,0,0,0);toucha((uint16_t*)(b+ROW),0,0,0);toucha((uint16_t*)(b+2*ROW),0,0,0);return 0;}
static float o_all(const uint8_t*b,long next,int me){toucha((uint16_t*)b,next,1,0);toucha((uint16_t*)(b+ROW),next,1,0);toucha((uint16_t*)(b+2*ROW),next,1,0);return 0;}
// one row ahead along the sequence
static float v_seq1(const uint8_t*b,long next,int me){float g=dota((uint16_t*)b,ROW,1,0),u=dota((uint16_t*)(b+ROW),ROW,1,0);axpyp(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me],next-2*ROW);return g;}
static float v_seq2(const uint8_t*b,long next,int me){float g=dota((uint16_t*)b,2*ROW,1,0),u=dota((uint16_t*)(b+ROW),next-ROW,1,0);axpyp(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me],next-ROW);return g;}
// half a row ahead along the sequence: second half of the row, then first half of next
static float v_half(const uint8_t*b,long next,int me){return 0;}
// gate and up merged in one loop (x loaded once), two streams
static float v_gu2(const uint8_t*b,long next,int me){const uint16_t*a=(uint16_t*)b,*w=(uint16_t*)(b+ROW);__m256 s0=_mm256_setzero_ps(),s1=s0,t0=s0,t1=s0;
 for(int i=0;i<COLS;i+=32){_mm_prefetch((const char*)(a+i)+next,_MM_HINT_T1);_mm_prefetch((const char*)(w+i)+next,_MM_HINT_T1);
  for(int k=0;k<32;k+=16){__m256 x0=_mm256_load_ps(x+i+k),x1=_mm256_load_ps(x+i+k+8);s0=_mm256_fmadd_ps(H(a+i+k),x0,s0);s1=_mm256_fmadd_ps(H(a+i+k+8),x1,s1);t0=_mm256_fmadd_ps(H(w+i+k),x0,t0);t1=_mm256_fmadd_ps(H(w+i+k+8),x1,t1);}}
 float g=hs(s0,s1,_mm256_setzero_ps(),_mm256_setzero_ps()),u=hs(t0,t1,_mm256_setzero_ps(),_mm256_setzero_ps());axpyp(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me],next);return g;}
#define DOTX(h,NAME) static inline __attribute__((always_inline)) float NAME(const uint16_t*a,long ahead){__m256 s0=_mm256_setzero_ps(),s1=s0,s2=s0,s3=s0; for(int i=0;i<COLS;i+=32){ _mm_prefetch((const char*)(a+i)+ahead,h); FMA4(i)} return hs(s0,s1,s2,s3);}
DOTX(_MM_HINT_T0,dx0) DOTX(_MM_HINT_NTA,dxn)
static float v_all_t0(const uint8_t*b,long next,int me){float g=dx0((uint16_t*)b,next),u=dx0((uint16_t*)(b+ROW),next);axpyp(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me],next);return g;}
static float v_all_nta(const uint8_t*b,long next,int me){float g=dxn((uint16_t*)b,next),u=dxn((uint16_t*)(b+ROW),next);axpyp(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me],next);return g;}
// burst: prefetch whole next gate row at the start (64 lines), then per row
static float v_burst(const uint8_t*b,long next,int me){for(int k=0;k<3*ROW;k+=64)_mm_prefetch((const char*)b+next+k,_MM_HINT_T1);float g=dota((uint16_t*)b,0,0,0),u=dota((uint16_t*)(b+ROW),0,0,0);axpy(g*u*1e-9f,(uint16_t*)(b+2*ROW),outv[me]);return g;}
typedef float(*F3)(const uint8_t*,long,int);
struct {const char*n;F3 f;} gs[]={{"or none",o_none},{"or all",o_all},{"none",v_none},{"all,no touch",v_all_nt},{"up->gate",v_up0},{"seq1",v_seq1},{"seq2",v_seq2},{"gu2",v_gu2},{"all t0",v_all_t0},{"all nta",v_all_nta},{"burst",v_burst}};
#define NB (1024*1024/12)
static int list[NB]; static int nl;
static int nt;static F3 cur;static volatile size_t next_,end_;static volatile int gen,done_,quit_;
static void chunkrun(int me){float s=0;const size_t chunk=18;for(;;){size_t c=__atomic_fetch_add(&next_,chunk,__ATOMIC_RELAXED);if(c>=end_)break;for(size_t k=c;k<c+chunk;k++){long nx=k+1<c+chunk?(long)(list[k+1]-list[k])*3*ROW:0;s+=cur(base+(size_t)list[k]*3*ROW,nx,me);}}sink[me]=s;}
static void*work(void*p){int g=0;for(;;){while(gen==g)_mm_pause();g=gen;if(quit_)return 0;chunkrun(1);__atomic_fetch_add(&done_,1,__ATOMIC_SEQ_CST);}}
static double slice(F3 f,size_t from,size_t n){cur=f;next_=from;end_=from+n;done_=0;double a=now();if(nt==2)__atomic_fetch_add(&gen,1,__ATOMIC_SEQ_CST);chunkrun(0);if(nt==2)while(done_<1)_mm_pause();return n*3.0*ROW/(now()-a)/1e9;}
static int cmp(const void*a,const void*b){double d=*(double*)a-*(double*)b;return d<0?-1:d>0;}
int main(int c,char**v){nt=atoi(v[1]);const char*f=v[2];int rot=c>3?atoi(v[3]):60;double act=c>4?atof(v[4]):0.1;
 for(int i=0;i<COLS;i++)x[i]=i*1e-6f;
 bytes=1024u<<20;
 {int fd=open(f,O_RDONLY);base=mmap(0,bytes,PROT_READ,MAP_SHARED,fd,512u<<20);madvise(base,bytes,MADV_HUGEPAGE);volatile int s=0;for(size_t i=0;i<bytes;i+=4096)s+=base[i];}
 srand(1);for(int i=0;i<NB;i++)if(rand()<act*RAND_MAX)list[nl++]=i;
 pthread_t t;if(nt==2)pthread_create(&t,0,work,0);
 int n=sizeof gs/sizeof*gs;static double r[32][4096];size_t per=18*100,at=0;
 for(int k=0;k<rot;k++)for(int j=0;j<n;j++){int i=(j+k)%n;at=(at+per)%(nl-per-1);r[i][k]=slice(gs[i].f,at,per);}
 for(int i=0;i<n;i++){qsort(r[i],rot,8,cmp);printf("%-14s q1 %5.1f med %5.1f q3 %5.1f max %5.1f\n",gs[i].n,r[i][rot/4],r[i][rot/2],r[i][rot*3/4],r[i][rot-1]);}
 quit_=1;gen++;return 0;}
